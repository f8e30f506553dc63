"""Ops that move elements without computing: shapes, slices, concatenation. All are linear.

Most write their notation line from the call's arguments, with one letter per tensor dim: `dims(3)` is
`["d0", "d1", "d2"]`, and a dim the op cuts or mixes is marked whole. Reshapes compare sizes instead.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import torch

from autoshard.base.graph import Call, TensorMeta
from autoshard.base.spec import PSUM, R
from autoshard.rules.family import Family
from autoshard.rules.notation import rule
from autoshard.rules.ops.row_writes import write_rows
from autoshard.rules.parts import addressed, contiguous_inputs, output_axes
from autoshard.rules.types import LocalContext, Row, Rule

aten = torch.ops.aten


# ---- reshapes

def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[range, range]]:
    """Smallest runs of `old` and `new` (no ones in either) with equal products, in order."""
    i = j = 0
    while i < len(old) and j < len(new):
        a, b, i0, j0 = old[i], new[j], i, j
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a, i = a * old[i], i + 1
            else:
                b, j = b * new[j], j + 1
        yield range(i0, i), range(j0, j)


def _proper(sizes: Sequence[int]) -> list[int]:
    """Positions of sizes other than 1."""
    return [i for i, n in enumerate(sizes) if n != 1]


def reshape_rows(call: Call) -> tuple[Row, ...]:
    """In every run of dims that keeps its product the major dim passes a shard; Partial passes."""
    old, new = call.inputs[0].logical_shape, call.output().logical_shape
    rows = [Row((R,), (R,))]
    if 0 not in old:
        i, o = _proper(old), _proper(new)
        rows += [Row((i[a[0]],), (o[b[0]],)) for a, b in _groups([old[x] for x in i], [new[x] for x in o])]
    return (*rows, Row((PSUM,), (PSUM,)))


def reshape_factors(call: Call) -> tuple[tuple[tuple[int, ...], ...]]:
    """A merge into dim 0 keeps its factors (batch and sequence, batch and heads), as does a dim that was already flat. Of several dims that
    become several others (batch, heads x width -> batch x heads, width) every one has the factors at which both can be cut. Every other dim comes
    out plain."""
    meta, shape = call.inputs[0], call.output().shape
    factors: list[tuple[int, ...]] = [(n,) for n in shape]
    if 0 not in shape:
        old, new = [n for n in meta.logical_shape if n != 1], _proper(shape)
        flat = {tuple(n for n in f if n != 1) for f in meta.factors}
        for a, b in _groups(old, [shape[x] for x in new]):
            parts = tuple(old[i] for i in a)
            if len(b) == 1 and (new[b[0]] == 0 or parts in flat):
                factors[new[b[0]]] = parts
            elif len(a) > 1 and len(b) > 1:
                for at, parts in zip(b, _cut_alike([old[i] for i in a], [shape[new[j]] for j in b]), strict=True):
                    factors[new[at]] = parts
    return (tuple(factors),)


def _cut_alike(old: Sequence[int], new: Sequence[int]) -> list[tuple[int, ...]]:
    """The factors of every size of `new`, so that `old` is cut between factors too; the sizes as they are where there are none such."""
    ends = sorted({prod(sizes[i:]) for sizes in (old, new) for i in range(len(sizes) + 1)}, reverse=True)
    if any(a % b for a, b in pairwise(ends)):
        return [(n,) for n in new]
    cuts = [ends.index(prod(new[i:])) for i in range(len(new) + 1)]
    return [tuple(a // b for a, b in pairwise(ends[i:j + 1])) for i, j in pairwise(cuts)]


def _reshape(ctx: LocalContext, x: Any, *args: Any, **kwargs: Any) -> Any:
    """The local tensor may have strides that `view` refuses, or dims of size 1 that `squeeze` would drop."""
    return aten.reshape.default(x, list(ctx.local_out(0)))


RESHAPE = Rule(rows=reshape_rows, factors=reshape_factors, local=_reshape, family=Family.VIEW,
               notation="reshape: the major dim of every run with equal product")


# ---- notation from arguments

def dims(meta: TensorMeta | int) -> list[str]:
    n = meta if isinstance(meta, int) else len(meta.shape)
    return [f"d{i}" for i in range(n)]


def listed(value: Any) -> tuple[int, ...]:
    """A dims argument as a tuple: it may be a number, a list or missing."""
    return () if value is None else tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _line(old: list[str], new: list[str]) -> str:
    return f"{' '.join(old)} -> {' '.join(new)}"


def _view(text: Callable[[Call], str], **options: Any) -> Rule:
    return rule(text, partial="each", family=Family.VIEW, **options)


def _copy(text: Callable[[Call], str] | str, **options: Any) -> Rule:
    return rule(text, **{"partial": "each", "family": Family.COPY, **options})


def _writes(text: Callable[[Call], str], local: Callable[..., Any]) -> Rule:
    return addressed(_copy(text, local=local), 0, lambda call: [_dim(call)])


def _dim(call: Call, name: str = "dim", ndim: int | None = None) -> int:
    ndim = len(call.inputs[0].shape) if ndim is None else ndim
    dim: int = call.argument(name)
    return dim % max(ndim, 1)


def _permute(call: Call) -> str:
    d = dims(call.inputs[0])
    return _line(d, [d[i] for i in call.argument("dims")])


def _transpose(call: Call) -> str:
    d = dims(call.inputs[0])
    new, i, j = list(d), _dim(call, "dim0"), _dim(call, "dim1")
    if d:
        new[i], new[j] = d[j], d[i]
    return _line(d, new)


def _t(call: Call) -> str:
    d = dims(call.inputs[0])
    return _line(d, d[::-1])


def _expand(call: Call) -> str:
    """A dim made by expanding may come out in any shard."""
    d, n = dims(call.inputs[0]), len(call.output().shape)
    return _line(d, [f"new{i}" for i in range(n - len(d))] + d)


def _unsqueeze(call: Call) -> str:
    d = dims(call.inputs[0])
    at = _dim(call, ndim=len(d) + 1)
    return _line(d, d[:at] + ["1"] + d[at:])


def _squeeze(call: Call) -> str:
    d, shape, dim = dims(call.inputs[0]), call.inputs[0].shape, call.argument("dim")
    chosen = range(len(d)) if dim is None else [x % len(d) for x in listed(dim) if d]
    return _line(d, [x for i, x in enumerate(d) if i not in chosen or shape[i] != 1])


def _select(call: Call) -> str:
    d, at = dims(call.inputs[0]), _dim(call)
    return _line(d[:at] + ["cut!"] + d[at + 1:], d[:at] + d[at + 1:])


def _select_backward(call: Call) -> str:
    d = dims(call.output())
    at = _dim(call, ndim=len(d))
    return _line(d[:at] + d[at + 1:], d[:at] + ["cut!"] + d[at + 1:])


def _slice(call: Call) -> str:
    """A slice of everything passes its dim, one part of a dim made of parts its share of the part. The gradient likewise."""
    d, at = dims(call.inputs[0]), _dim(call)
    if call.inputs[0].shape == call.output().shape:
        return _line(d, d)
    whole, part = sorted((call.inputs[0], call.output()), key=lambda m: -m.shape[at])
    whole_steps = (call.argument("step") or 1) == 1
    if whole_steps and _are_parts(whole, [part], at, whole.shape[at] // max(part.shape[at], 1)) and _start(call, whole, at) % part.shape[at] == 0:
        shared = d[:at] + [f"@{d[at]}"] + d[at + 1:]
        return _line(shared, shared)
    return _line(d[:at] + ["old!"] + d[at + 1:], d[:at] + ["new!"] + d[at + 1:])


def _are_parts(whole: TensorMeta, parts: Sequence[TensorMeta | None], at: int, count: int) -> bool:
    """Whether dim `at` of a tensor consists of `count` parts, and `parts` are such ones."""
    return whole.parts_of(at) == count > 1 and all(m is not None and m.shape[at] * count == whole.shape[at] for m in parts)


def _start(call: Call, whole: TensorMeta, at: int) -> int:
    start = call.argument("start") or 0
    return max(start + whole.shape[at], 0) if start < 0 else start


def _piece(ctx: LocalContext, whole: TensorMeta, local: int, at: int) -> tuple[int, int]:
    """Where a slice begins and ends in a local dim of length `local`; a dim that is split is made of parts, or sliced whole."""
    part = min(ctx.call.inputs[0].shape[at], ctx.call.output().shape[at])
    start, n = _start(ctx.call, whole, at), whole.shape[at]
    return start * local // n, (start + part) * local // n


def _local_slice(ctx: LocalContext, x: Any, *args: Any, **kwargs: Any) -> Any:
    whole, at = ctx.call.inputs[0], _dim(ctx.call)
    if ctx.local_in(0)[at] == whole.shape[at]:
        return ctx.call.target(x, *args, **kwargs)
    return aten.slice.Tensor(x, at, *_piece(ctx, whole, ctx.local_in(0)[at], at), 1)


def _local_slice_backward(ctx: LocalContext, x: Any, sizes: Any, *args: Any, **kwargs: Any) -> Any:
    whole, at = ctx.call.output(), _dim(ctx.call)
    if ctx.local_out(0)[at] == whole.shape[at]:
        return ctx.call.target(x, list(ctx.local_out(0)), *args, **kwargs)
    return aten.slice_backward.default(x, list(ctx.local_out(0)), at, *_piece(ctx, whole, ctx.local_out(0)[at], at), 1)


def _local_split(ctx: LocalContext, x: Any, *args: Any, **kwargs: Any) -> Any:
    meta, at = ctx.call.inputs[0], _dim(ctx.call)
    if ctx.local_in(0)[at] == meta.shape[at]:
        return ctx.call.target(x, *args, **kwargs)
    return aten.split_with_sizes.default(x, [ctx.local_in(0)[at] // len(ctx.call.outputs)] * len(ctx.call.outputs), at)


def _split(call: Call) -> str:
    """Pieces that are the parts of the dim have their share of it."""
    d, at = dims(call.inputs[0]), _dim(call)
    if _are_parts(call.inputs[0], call.outputs, at, len(call.outputs)):
        shared = " ".join(d[:at] + [f"@{d[at]}"] + d[at + 1:])
        return f"{shared} -> {', '.join([shared] * len(call.outputs))}"
    part = " ".join(d[:at] + ["part!"] + d[at + 1:])
    return f"{' '.join(d[:at] + ['whole!'] + d[at + 1:])} -> {', '.join([part] * len(call.outputs))}"


def _unbind(call: Call) -> str:
    d, at = dims(call.inputs[0]), _dim(call)
    part = " ".join(d[:at] + d[at + 1:])
    return f"{' '.join(d[:at] + ['cut!'] + d[at + 1:])} -> {', '.join([part] * len(call.outputs))}"


def _cat(call: Call) -> str:
    d = dims(call.output())
    at = _dim(call, ndim=len(d))
    if _are_parts(call.output(), call.inputs, at, len(call.inputs)):
        shared = d[:at] + [f"@{d[at]}"] + d[at + 1:]
        return _line(shared, shared)
    return _line(d[:at] + ["part!"] + d[at + 1:], d[:at] + ["whole!"] + d[at + 1:])


def _stack(call: Call) -> str:
    d = dims(call.inputs[0])
    at = _dim(call, ndim=len(d) + 1)
    return _line(d, d[:at] + ["new!"] + d[at:])


def _slice_scatter(call: Call) -> str:
    d, at = dims(call.inputs[0]), _dim(call)
    outer, inner = (" ".join(d[:at] + [x] + d[at + 1:]) for x in ("all", "part!"))
    return f"{outer} + {inner} -> {outer}"


def _write_slice(ctx: LocalContext, x: Any, src: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    dim, axes = dim % len(ctx.local_in(0)), output_axes(ctx, 0, dim)
    if not axes:
        return ctx.call.target(x, src, dim, start, end, step)
    size = ctx.call.inputs[0].shape[dim]
    ids = aten.arange.start_step(*slice(start, end, step).indices(size), dtype=torch.int64)
    return write_rows(ctx, x, dim, ids, src, axes)


def _write_select(ctx: LocalContext, x: Any, src: Any, dim: int, index: int) -> Any:
    dim, axes = dim % len(ctx.local_in(0)), output_axes(ctx, 0, dim)
    if not axes:
        return ctx.call.target(x, src, dim, index)
    ids = aten.full.default([1], index % ctx.call.inputs[0].shape[dim], dtype=torch.int64)
    return write_rows(ctx, x, dim, ids, aten.unsqueeze.default(src, dim), axes)


def _select_scatter(call: Call) -> str:
    d, at = dims(call.inputs[0]), _dim(call)
    outer = " ".join(d[:at] + ["all"] + d[at + 1:])
    return f"{outer} + {' '.join(d[:at] + d[at + 1:])} -> {outer}"


def _keep_but(*names: str) -> Callable[[Call], str]:
    """Same dims in and out; those listed in the arguments `names` stay whole (an empty list: all)."""
    def text(call: Call) -> str:
        d = dims(call.inputs[0])
        chosen = [x % len(d) for n in names for x in listed(call.argument(n))] or range(len(d))
        marked = [x + "!" if i in chosen else x for i, x in enumerate(d)]
        return _line(marked, marked)
    return text


def _repeat(call: Call) -> str:
    d, times = dims(call.inputs[0]), call.argument("repeats")
    extra = len(times) - len(d)
    marked = [x if n == 1 else x + "!" for x, n in zip(d, times[extra:], strict=True)]
    return _line(marked, [f"new{i}!" for i in range(extra)] + marked)


def _pad(call: Call) -> str:
    d, pad = dims(call.inputs[0]), call.argument("pad")
    padded = {len(d) - 1 - i // 2 for i, n in enumerate(pad) if n != 0}
    return _line([x + "in!" if i in padded else x for i, x in enumerate(d)],
                 [x + "out!" if i in padded else x for i, x in enumerate(d)])


def _diagonal(call: Call) -> str:
    d = dims(call.inputs[0])
    i, j = _dim(call, "dim1"), _dim(call, "dim2")
    kept = [x for n, x in enumerate(d) if n not in (i, j)]
    return _line([x + "!" if n in (i, j) else x for n, x in enumerate(d)], [*kept, "diagonal!"])


def _diagonal_backward(call: Call) -> str:
    d = dims(call.output())
    i, j = _dim(call, "dim1", len(d)), _dim(call, "dim2", len(d))
    kept = [x for n, x in enumerate(d) if n not in (i, j)]
    return _line([*kept, "diagonal!"], [x + "!" if n in (i, j) else x for n, x in enumerate(d)])


def _unfold(call: Call) -> str:
    d, at = dims(call.inputs[0]), _dim(call, "dimension")
    return _line(d[:at] + ["in!"] + d[at + 1:], d[:at] + ["out!"] + d[at + 1:] + ["window!"])


def _unfold_backward(call: Call) -> str:
    d = dims(call.output())
    at = _dim(call, ndim=len(d))
    return _line(d[:at] + ["out!"] + d[at + 1:] + ["window!"], d[:at] + ["in!"] + d[at + 1:])


_same = _view(lambda call: "... -> ...")
_triangle = rule("... r! c! -> ... r! c!", partial="each")
_inputs_like_out = (("input_sizes", "out0"),)

RULES = {
    aten.view.default: RESHAPE,
    aten._unsafe_view.default: RESHAPE,
    aten.reshape.default: RESHAPE,
    aten._reshape_alias.default: RESHAPE,
    aten._reshape_copy.default: replace(RESHAPE, family=Family.COPY),
    aten.view_copy.default: replace(RESHAPE, family=Family.COPY),
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.t.default: _view(_t),
    aten.transpose.int: _view(_transpose),
    aten.permute.default: _view(_permute),
    aten.expand.default: _view(_expand, sizes=(("size", "out0"),)),
    aten.unsqueeze.default: _view(_unsqueeze),
    aten.squeeze.default: _view(_squeeze, local=_reshape),
    aten.squeeze.dim: _view(_squeeze, local=_reshape),
    aten.squeeze.dims: _view(_squeeze, local=_reshape),
    aten.select.int: _view(_select),
    aten.slice.Tensor: _view(_slice, local=_local_slice),
    aten.split.Tensor: _view(_split, local=_local_split),
    aten.split_with_sizes.default: _view(_split, local=_local_split),
    aten.unsafe_split.Tensor: _view(_split, local=_local_split),
    aten.unsafe_split_with_sizes.default: _view(_split, local=_local_split),
    aten.chunk.default: _view(_split, local=_local_split),
    aten.unbind.int: _view(_unbind),
    aten.diagonal.default: _view(_diagonal),
    aten.unfold.default: _view(_unfold),
    aten.view_as_real.default: _view(lambda call: "... -> ... pair!"),
    # a gather may leave the numbers of a pair apart
    aten.view_as_complex.default: _view(lambda call: "... pair! -> ...", local=contiguous_inputs),
    aten.cat.default: rule(_cat, partial="all", family=Family.COPY),
    aten.stack.default: rule(_stack, partial="all", family=Family.COPY),
    aten.select_backward.default: _copy(_select_backward, sizes=_inputs_like_out),
    aten.slice_backward.default: _copy(_slice, local=_local_slice_backward),
    aten.diagonal_backward.default: _copy(_diagonal_backward, sizes=_inputs_like_out),
    aten.unfold_backward.default: _copy(_unfold_backward, sizes=(("input_sizes", "out0"),)),
    aten.slice_scatter.default: _writes(_slice_scatter, _write_slice),
    aten.select_scatter.default: _writes(_select_scatter, _write_select),
    aten.repeat.default: _copy(_repeat),
    aten.flip.default: _copy(_keep_but("dims")),
    aten.roll.default: _copy(_keep_but("dims")),
    aten.constant_pad_nd.default: _copy(_pad, partial=lambda call: "each" if call.argument("value") == 0 else "none"),
    aten.tril.default: _triangle,
    aten.triu.default: _triangle,
}
