"""Gathers, scatters, sorts. Dims that are not indexed split; so do the indices; so does the indexed table:
a rank then reads the entries it holds (Partial) or writes those that land in its part.

A write that lands elsewhere repeats one that lands here (row_writes.py), or goes to a spare row that is cut off afterwards. Indices
into a split table may be negative only where torch allows it (index, index_put)."""
from __future__ import annotations

from typing import Any

import torch

from autoshard.base.graph import Call
from autoshard.rules.family import Family
from autoshard.rules.notation import NotationMismatch, Passes, rule
from autoshard.rules.ops.row_writes import write_elements, write_rows
from autoshard.rules.parts import (
    addressed,
    dims_but,
    from_the_front,
    input_axes,
    letters,
    local_ids,
    on_first,
    output_axes,
    partial_axes,
    zero_where_not,
)
from autoshard.rules.types import LocalContext, Rule

aten = torch.ops.aten


def _spare(x: Any, dim: int, shape: tuple[int, ...]) -> Any:
    """`x` (of local `shape`) with one more entry along `dim`."""
    extra = [1 if d == dim else n for d, n in enumerate(shape)]
    return aten.cat.default([x, aten.new_zeros.default(x, extra)], dim)


def _cut(x: Any, dim: int, size: int) -> Any:
    return aten.slice.Tensor(x, dim, 0, size)


def _redirect(ctx: LocalContext, ids: Any, axes: tuple[int, ...], dim: int) -> Any:
    """Indices into the local part; those of other ranks point at the spare entry, those outside of the dim behind it."""
    size = ctx.local_in(0)[dim]
    local, mine = local_ids(ctx, ids, axes, size, _length(ctx, dim))
    return aten.add.Tensor(aten.where.ScalarOther(mine, local, size), aten.eq.Scalar(local, size))


def _length(ctx: LocalContext, dim: int) -> int:
    """Of the table along `dim`, on all ranks together."""
    return ctx.call.inputs[0].true_shape[dim]


# Along one dim: gather, scatter, index_select, index_add ------------------------------------------------

def _lined(call: Call, *names: str, table: str = "v", index: str = "g") -> list[str]:
    """Letters of tensors that agree in every dim but `dim`. There the first is the table, the others have
    the index's letter. Dims whose sizes differ stay whole."""
    metas = [call.tensor(n) for n in names]
    n = len(metas[0].shape)
    if not n:
        raise NotationMismatch("an index into a number")
    dim = call.argument("dim") % n
    same = [len({m.shape[d] for m in metas}) == 1 for d in range(n)]
    if len({m.shape[dim] for m in metas[1:]}) > 1:
        index = index.rstrip("!") + "!"
    other = [f"x{d}" if same[d] else f"x{d}!" for d in range(n)]
    return [" ".join((table if i == 0 else index) if d == dim else other[d] for d in range(n))
            for i in range(len(names))]


def _gather_line(call: Call) -> str:
    table, index = _lined(call, "self", "index")
    return f"{table}, {index} -> {index}"


def _gather(ctx: LocalContext, x: Any, dim: int, index: Any, **kwargs: Any) -> Any:
    axes = input_axes(ctx, 0, dim)
    if not axes:
        return ctx.call.target(x, dim, index, **kwargs)
    local, mine = local_ids(ctx, index, axes, ctx.local_in(0)[dim], _length(ctx, dim))
    return zero_where_not(aten.gather.default(x, dim, local), mine)


def _scatter_add_line(call: Call) -> str:
    table, index, src = _lined(call, "self", "index", "src")
    return f"{table}, {index}, {src} -> {table}"


def _scatter_line(call: Call) -> str:
    """Overwriting is not a sum: the indices stay whole."""
    names = ("self", "index", "src") if call.given("src") else ("self", "index")
    table, *rest = _lined(call, *names, index="g!")
    return f"{', '.join((table, *rest))} -> {table}"


def _scatter(ctx: LocalContext, x: Any, dim: int, index: Any, *rest: Any, **kwargs: Any) -> Any:
    """Any scatter: into the local part of a split table, or (scatter_add) a share of the sum."""
    x = on_first(ctx, x, partial_axes(ctx, ctx.outputs[0]))
    axes, shape = output_axes(ctx, 0, dim), ctx.local_in(0)
    if not axes:
        return ctx.call.target(x, dim, index, *rest, **kwargs)
    dim %= len(shape)
    if ctx.call.target is aten.index_copy.default:
        return write_rows(ctx, x, dim, index, rest[0], axes)
    if ctx.call.target is aten.scatter.src and ctx.call.tensor("index").shape == ctx.call.tensor("src").shape:
        return write_elements(ctx, x, dim, index, rest[0], axes)
    index = _redirect(ctx, index, axes, dim)
    return _cut(ctx.call.target(_spare(x, dim, shape), dim, index, *rest, **kwargs), dim, shape[dim])


def _index_select_line(call: Call) -> str:
    table = dims_but(call, ()).split()
    if not table:
        raise NotationMismatch("an index into a number")
    dim = call.argument("dim") % len(table)
    out = ["g" if d == dim else x for d, x in enumerate(table)]
    return f"{' '.join(table)}, g -> {' '.join(out)}"


def _index_select(ctx: LocalContext, x: Any, dim: int, index: Any) -> Any:
    axes = input_axes(ctx, 0, dim)
    if not axes:
        return aten.index_select.default(x, dim, index)
    shape = ctx.local_in(0)
    dim %= len(shape)
    local, mine = local_ids(ctx, index, axes, shape[dim], _length(ctx, dim))
    mine = aten.view.default(mine, [-1 if d == dim else 1 for d in range(len(shape))])
    return zero_where_not(aten.index_select.default(x, dim, local), mine)


def _index_add_line(call: Call) -> str:
    table, source = _lined(call, "self", "source")
    return f"{table}, g, {source} -> {table}"


def _index_write_line(call: Call) -> str:
    """index_copy and index_fill."""
    if call.given("source"):
        table, source = _lined(call, "self", "source", index="g!")
        return f"{table}, g!, {source} -> {table}"
    table = dims_but(call, ())
    return f"{table}, g! -> {table}"


# Several indexed dims: index, index_put -----------------------------------------------------------------

def _indexed(call: Call) -> list[int]:
    """The dims that have an index tensor."""
    return [d for d, i in enumerate(call.argument("indices")) if i is not None]


def _index_terms(call: Call) -> tuple[list[str], list[str]]:
    """Letters of the table, and of what indexing it gives: `...` (the indices' own dims) stands at the first
    indexed dim, or in front when indexed dims are apart. Only a single indexed dim may be split."""
    at = _indexed(call)
    metas = [call.inputs[call.argument("indices")[d].index] for d in at]
    if not at or any(m.dtype in (torch.bool, torch.uint8) for m in metas):
        raise NotationMismatch("indexing by masks has no fixed shape")
    n = len(call.tensor("self").shape)
    table = [f"x{d}" if d not in at else "v" if len(at) == 1 else f"v{d}!" for d in range(n)]
    block = [f"...{i}" for i in range(max(len(m.shape) for m in metas), 0, -1)]
    first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    rest = [f"x{d}" for d in range(n) if d not in at]
    return table, rest[:first] + block + rest[first:]


def _index_line(call: Call) -> str:
    table, result = _index_terms(call)
    return f"{' '.join(table)}, ... -> {' '.join(result)}"


def _index_put_line(call: Call) -> str:
    """Adding may split the indices (a share of the sum each); overwriting may not."""
    table, result = _index_terms(call)
    values = result[len(result) - len(call.tensor("values").shape):]
    mark = "" if call.argument("accumulate") else "!"
    return f"{' '.join(table)}, ...{mark}, {' '.join(values)} -> {' '.join(table)}"


def _index(ctx: LocalContext, x: Any, indices: Any) -> Any:
    at = _indexed(ctx.call)
    axes = input_axes(ctx, 0, at[0]) if len(at) == 1 else ()
    if not axes:
        return ctx.call.target(x, indices)
    dim = at[0]
    ids = from_the_front(indices[dim], _length(ctx, dim))
    local, mine = local_ids(ctx, ids, axes, ctx.local_in(0)[dim], _length(ctx, dim))
    trailing = len(ctx.call.inputs[0].shape) - dim - 1
    mine = aten.view.default(mine, [*ctx.local_in(1), *[1] * trailing])
    return zero_where_not(ctx.call.target(x, [*indices[:dim], local]), mine)


def _index_put(ctx: LocalContext, x: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    x = on_first(ctx, x, partial_axes(ctx, ctx.outputs[0]))
    at, shape = _indexed(ctx.call), ctx.local_in(0)
    axes = output_axes(ctx, 0, at[0]) if len(at) == 1 else ()
    if not axes:
        return ctx.call.target(x, indices, values, accumulate)
    dim = at[0]
    ids = from_the_front(indices[dim], _length(ctx, dim))
    if not accumulate and len(ctx.call.inputs[1].shape) == 1 and len(ctx.call.tensor("values").shape) == len(shape) and _are_whole(ctx):
        return write_rows(ctx, x, dim, ids, values, axes)
    ids = _redirect(ctx, ids, axes, dim)
    return _cut(ctx.call.target(_spare(x, dim, shape), [*indices[:dim], ids], values, accumulate), dim, shape[dim])


def _are_whole(ctx: LocalContext) -> bool:
    """Whether the values of an index_put are there for every row and element: none is written twice."""
    table, values = ctx.call.inputs[0].shape, ctx.call.tensor("values").shape
    wanted = [ctx.call.inputs[1].shape[0] if d in _indexed(ctx.call) else n for d, n in enumerate(table)]
    return list(values) == wanted


# Order --------------------------------------------------------------------------------------------------

def _ordered(outputs: int) -> Rule:
    """Sorting and the like need all of `dim`."""
    def line(call: Call) -> str:
        dims = dims_but(call, (call.argument("dim"),))
        return f"{dims} -> {', '.join([dims] * outputs)}"

    return rule(line, family=Family.GATHER)


def _searchsorted_line(call: Call) -> str:
    sequence, values = call.tensor("sorted_sequence"), call.given("self")
    if len(sequence.shape) == 1:
        return "b!, ..., s! -> ..."
    lead = letters("x", len(sequence.shape) - 1)
    return f"{lead} b!, {lead} s, {lead} b! -> {lead} s" if values else f"{lead} b! -> {lead}"


def _histogram_line(call: Call) -> str:
    """Counts of shards add up when all use the same bins, that is, when the range is given."""
    given = call.argument("min") != call.argument("max")
    return f"{dims_but(call, () if given else range(len(call.inputs[0].shape)))} -> b!"


def _take_line(call: Call) -> str:
    return f"{letters('v', len(call.inputs[0].shape), '!')}, ... -> ..."


def _one(line: Any, local: Any = None, partial: Passes = "none") -> Rule:
    base = rule(line, family=Family.GATHER, local=local, partial=partial)
    return base if local is None else addressed(base, 0, _looked_up)


def _looked_up(call: Call) -> list[int]:
    """Dims of the table that indices point into."""
    names = {a.name for a in call.target._schema.arguments}
    return _indexed(call) if "indices" in names else [call.argument("dim")]


RULES = {
    aten.gather.default: _one(_gather_line, _gather, "each"),
    aten.scatter_add.default: _one(_scatter_add_line, _scatter),
    aten.scatter.src: _one(_scatter_line, _scatter),
    aten.scatter.value: _one(_scatter_line, _scatter),
    aten.scatter_reduce.two: _one(_scatter_line, _scatter),
    aten.index_select.default: _one(_index_select_line, _index_select, "each"),
    aten.index_add.default: _one(_index_add_line, _scatter),
    aten.index_copy.default: _one(_index_write_line, _scatter),
    aten.index_fill.int_Scalar: _one(_index_write_line, _scatter),
    aten.index.Tensor: _one(_index_line, _index, "each"),
    aten._unsafe_index.Tensor: _one(_index_line, _index, "each"),
    aten.index_put.default: _one(_index_put_line, _index_put),
    aten._unsafe_index_put.default: _one(_index_put_line, _index_put),
    aten.topk.default: _ordered(2),
    aten.sort.default: _ordered(2),
    aten.sort.stable: _ordered(2),
    aten.argsort.default: _ordered(1),
    aten.argsort.stable: _ordered(1),
    aten.cummax.default: _ordered(2),
    aten.cummin.default: _ordered(2),
    aten.searchsorted.Tensor: _one(_searchsorted_line),
    aten.bucketize.Tensor: _one("..., b! -> ..."),
    aten.histc.default: _one(_histogram_line),
    aten.take.default: _one(_take_line),
}
