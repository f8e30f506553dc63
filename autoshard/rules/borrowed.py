"""Rules borrowed from DTensor's registry of one-axis rows, for ops without an own rule.

Taken are Shard, Replicate and Partial sum, max and min; a row with anything else (strided shards, masked or
averaging Partials) is dropped. Refused altogether are random ops, whose replicas must agree and whose shards
must differ. A size argument that spells the shape of an output or input is replaced by the local shape.
Rows whose local shapes do not agree are dropped.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import gcd
from typing import Any

import torch

from autoshard import _torch
from autoshard.base.graph import Call, Slot, TensorMeta
from autoshard.base.spec import PMAX, PMIN, PSUM, Placement, R, local_shape
from autoshard.rules.types import LocalContext, Row, Rule

REFUSED = frozenset({"aten.index_reduce.default"})
"""Found wrong on torch's own samples: index_reduce's CPU kernel fails on pieces that are one entry wide."""
_CODES = {"replicate": R, "sum": PSUM, "max": PMAX, "min": PMIN}


@cache
def borrowed(target: Any) -> Rule | None:
    """DTensor's rule of an op, or None when there is none to trust."""
    if not isinstance(target, torch._ops.OpOverload) or not _torch.has_sharding_rule(target):
        return None
    if str(target) in REFUSED or target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    return Rule(rows=_rows, local=_local, origin="dtensor", notation="borrowed")


def _rows(call: Call) -> tuple[Row, ...]:
    whole = Row((R,) * len(call.inputs), (R,) * len(call.outputs))
    try:
        found = _torch.sharding_rows(call.target, *_on_meta(call, [m.shape for m in call.inputs]))
    except Exception:  # a call DTensor's function did not foresee has no borrowed rows
        return (whole,)
    rows = [row for words in found if (row := _row(call, words))]
    return (whole, *(row for row in dict.fromkeys(rows) if _shapes_agree(call, row)))


def _shapes_agree(call: Call, row: Row) -> bool:
    """Whether the op maps the local input shapes to the local output shapes. Not all of DTensor's rows do
    (`linalg_solve_triangular` with one batched operand whole)."""
    pairs = (*zip(call.inputs, row.inputs, strict=True), *zip(call.outputs, row.outputs, strict=True))
    common = gcd(*(m.logical_shape[p] for m, p in pairs if m is not None and p >= 0))
    if common == 0:
        return True
    n = next((k for k in range(2, common + 1) if common % k == 0), 0)
    if n == 0:
        return False

    def piece(m: TensorMeta, p: Placement) -> tuple[int, ...]:
        return m.unflatten(local_shape(m.logical_shape, (p,), (n,)))

    ins = [piece(m, p) for m, p in zip(call.inputs, row.inputs, strict=True)]
    outs = [None if m is None else piece(m, p) for m, p in zip(call.outputs, row.outputs, strict=True)]
    args, kwargs = _localized(call, *_on_meta(call, ins), ins, outs)
    try:
        result = call.target(*args, **kwargs)
    except Exception:  # the op refuses the local shapes
        return False
    result = result if isinstance(result, (tuple, list)) else (result,)
    return all(shape is None or tuple(y.shape) == shape for y, shape in zip(result, outs, strict=True))


def _on_meta(call: Call, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The op's arguments with tensors of `shapes` that take no memory."""
    def fill(value: Any) -> Any:
        if isinstance(value, tuple):
            return [fill(v) for v in value]
        if isinstance(value, Slot):
            return torch.empty(shapes[value.index], dtype=call.inputs[value.index].dtype, device="meta")
        return value

    return tuple(map(fill, call.args)), {k: fill(v) for k, v in call.kwargs}


def _row(call: Call, words: list[tuple[str, int]]) -> Row | None:
    metas = (*call.outputs, *call.inputs)
    if len(words) != len(metas):
        return None
    found = [_placement(word, dim, m) for (word, dim), m in zip(words, metas, strict=True)]
    placed = [p for p in found if p is not None]
    if len(placed) < len(found):
        return None
    n = len(call.outputs)
    return Row(tuple(placed[n:]), tuple(placed[:n]))


def _placement(word: str, dim: int, meta: TensorMeta | None) -> Placement | None:
    """A shard of a tensor dim is a shard of its major factor."""
    if meta is None:
        return R
    if word != "shard":
        return _CODES.get(word)
    if not -len(meta.shape) <= dim < len(meta.shape):
        return None
    return next((i for i in meta.logical_dims(dim) if meta.logical_shape[i] > 1), None)


def _local(ctx: LocalContext, *args: Any, **kwargs: Any) -> Any:
    call = ctx.call
    ins = [ctx.local_in(i) for i in range(len(call.inputs))]
    outs = [None if m is None else ctx.local_out(i) for i, m in enumerate(call.outputs)]
    args, kwargs = _localized(call, args, kwargs, ins, outs)
    return call.target(*args, **kwargs)


def _localized(call: Call, args: Sequence[Any], kwargs: dict[str, Any], ins: Sequence[Any],
               outs: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with size arguments that spell a whole shape replaced by that tensor's local shape."""
    names = [a.name for a in call.target._schema.arguments]
    pairs = (*zip(call.inputs, ins, strict=True), *zip(call.outputs, outs, strict=True))
    shapes = {m.shape: local for m, local in pairs if m is not None}  # an output wins over an input of equal shape
    sizes = {name: list(shapes[value]) for name in names if "size" in name
             and isinstance(value := call.argument(name), tuple) and value in shapes}
    return (tuple(sizes.get(n, a) for n, a in zip(names, args, strict=False)),
            {k: sizes.get(k, v) for k, v in kwargs.items()})
