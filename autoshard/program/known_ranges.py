"""Indices that are constants of the program and name a range (`x[:, [-1]]`) become slices, whose other dims and parts rules know."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from autoshard.base.graph import Graph, Op, Ref

aten = torch.ops.aten
ZEROS = (aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default)
SAME = (aten.lift_fresh.default, aten.lift_fresh_copy.default, aten.detach.default, aten.alias.default)


def with_known_ranges(graph: Graph, constants: Mapping[str, torch.Tensor]) -> Graph:
    """An equal graph that looks up no constant range. `constants`: their data by buffer name."""
    return replace(graph, ops=tuple(_as_slice(graph, op, constants) for op in graph.ops)) if constants else graph


def _as_slice(graph: Graph, op: Op, constants: Mapping[str, torch.Tensor]) -> Op:
    if op.kind != "call" or op.target not in (aten.index.Tensor, aten.index_put.default):
        return op
    x, given = op.args[:2]
    shape = graph.meta(x).shape
    dims = [d for d, index in enumerate(given) if index is not None]
    found = _range(graph, given[dims[0]], constants, shape[dims[0]]) if len(dims) == 1 else None
    if found is None:
        return op
    if op.target is aten.index.Tensor:
        return replace(op, target=aten.slice.Tensor, args=(x, dims[0], *found))
    summed, fits = op.args[3:] == (True,), graph.meta(op.args[2]).shape == (*shape[:dims[0]], found[1] - found[0], *shape[dims[0] + 1:])
    if not (summed and fits and graph.op(x.op).target in ZEROS):
        return op
    return replace(op, target=aten.slice_backward.default, args=(op.args[2], shape, dims[0], *found, 1))


def _range(graph: Graph, index: Ref, constants: Mapping[str, torch.Tensor], n: int) -> tuple[int, int] | None:
    """First and last position, that one not included, of an index that is a constant range of a dim of length `n`."""
    made = graph.op(index.op)
    while made.target in SAME:
        made = graph.op(made.refs[0].op)
    value = constants.get(made.target) if made.kind == "buffer" else None
    if value is None or value.is_meta or value.ndim != 1 or value.dtype is not torch.int64 or not 0 < len(value) <= n:
        return None
    at = [int(i) + n if i < 0 else int(i) for i in value]
    return (at[0], at[-1] + 1) if at == list(range(at[0], at[0] + len(at))) and 0 <= at[0] and at[-1] < n else None
