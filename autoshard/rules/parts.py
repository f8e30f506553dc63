"""Shared pieces of the special rules: notation text built from a call, rows adjusted after the notation,
and what a local implementation asks about the part of a dim its rank holds."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from autoshard.base.graph import Call, Slot, TensorMeta
from autoshard.base.spec import Spec, is_partial, is_shard
from autoshard.rules.types import LocalContext, Row, Rule

aten = torch.ops.aten


def letters(prefix: str, n: int, mark: str = "") -> str:
    """`letters("x", 3, "!")` -> `"x0! x1! x2!"`."""
    return " ".join(f"{prefix}{i}{mark}" for i in range(n))


def dims_but(call: Call, whole: Sequence[int]) -> str:
    """Letters for every dim of the first tensor input; those of `whole` are marked to stay whole."""
    n = len(call.inputs[0].shape)
    kept = {d % n for d in whole} if n else set()
    return " ".join(f"x{d}!" if d in kept else f"x{d}" for d in range(n))


def adjust(base: Rule, change: Callable[[Call, Row], Row]) -> Rule:
    """`base` with every row passed through `change`: the way to add inner collectives, or an output that
    is whole because of them."""
    return replace(base, rows=lambda call: tuple(change(call, row) for row in base.rows(call)))


def layer_dims(call: Call, mark: str = "!") -> tuple[str, str, str]:
    """Letters of (input, normalised dims, statistics) of a norm over the last dims. `mark`: of the normalised ones."""
    normed = len(call.argument("normalized_shape"))
    lead, dims = letters("x", len(call.tensor("input").shape) - normed), letters("y", normed, mark)
    return f"{lead} {dims}", dims, f"{lead} {' '.join(['1'] * normed)}"


def addressed(base: Rule, tensor: int, dim: Callable[[Call], Sequence[int]]) -> Rule:
    """`base` for an op that looks up positions along dims `dim(call)` of tensor input `tensor`. Of a dim with
    several factors only the major one may split: else a rank's positions are not one range."""
    def rows(call: Call) -> tuple[Row, ...]:
        meta = call.inputs[tensor]
        minor = {i for d in dim(call) for i in [i for i in meta.logical_dims(d) if meta.logical_shape[i] > 1][1:]}
        return tuple(row for row in base.rows(call) if row.inputs[tensor] not in minor)

    return replace(base, rows=rows, looks_up=(tensor, dim))


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are kept in: float32 for half precision, as torch's kernels do."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def cast(x: Any, have: torch.dtype, want: torch.dtype) -> Any:
    return x if have == want else aten._to_copy.default(x, dtype=want)


def contiguous_inputs(ctx: LocalContext, *args: Any, **kwargs: Any) -> Any:
    """Local implementation for kernels that take the memory of their inputs for contiguous, and are silently wrong where it
    is not."""
    dense = (aten.contiguous.default(a) if isinstance(given, Slot) else a for a, given in zip(args, ctx.call.args, strict=True))
    return ctx.call.target(*dense, **kwargs)


def axes_of(ctx: LocalContext, meta: TensorMeta, spec: Spec, dim: int) -> tuple[int, ...]:
    """Mesh axes that split tensor dim `dim`, over all its logical dims."""
    return tuple(a for d in meta.logical_dims(dim) for a in ctx.axes(spec, d))


def input_axes(ctx: LocalContext, i: int, dim: int) -> tuple[int, ...]:
    return axes_of(ctx, ctx.call.inputs[i], ctx.inputs[i], dim)


def output_axes(ctx: LocalContext, i: int, dim: int) -> tuple[int, ...]:
    return axes_of(ctx, ctx.call.output(i), ctx.outputs[i], dim)


def local_ids(ctx: LocalContext, ids: Any, axes: Sequence[int], size: int, whole: int = 0) -> tuple[Any, Any]:
    """Global indices into a dim split over `axes`, `size` of it here: (indices clamped into the local
    part, whether each index is in it). `whole`: size of the dim; indices outside of it become `size`, which the op's kernel refuses as it refuses
    them on one device. Without it they count as those of other ranks."""
    local = aten.sub.Tensor(ids, ctx.index(axes) * size)
    mine = aten.bitwise_and.Tensor(aten.ge.Scalar(local, 0), aten.lt.Scalar(local, size))
    local = aten.clamp.default(local, 0, size - 1)
    return refuse_outside(local, ids, whole, size) if whole else local, mine


def refuse_outside(local: Any, ids: Any, whole: int, size: int) -> Any:
    """`local`, but `size` where `ids` are outside of a dim of size `whole`: no index into `size` entries, so that a kernel refuses it."""
    return aten.masked_fill.Scalar(local, aten.ne.Tensor(aten.clamp.default(ids, 0, whole - 1), ids), size)


def from_the_front(ids: Any, whole: int) -> Any:
    """Indices, of which negative ones count from the end of a dim of size `whole`, counted from its front. Those outside of the dim stay outside."""
    return aten.where.self(aten.lt.Scalar(ids, 0), aten.add.Scalar(ids, whole), ids)


def zero_where_not(x: Any, keep: Any) -> Any:
    """`x` with zeros where `keep` is False. Not a product: rows may hold inf or nan."""
    return aten.masked_fill.Scalar(x, aten.logical_not.default(keep), 0.0)


def on_first(ctx: LocalContext, x: Any, axes: Sequence[int]) -> Any:
    """`x` on the first rank over `axes`, zeros elsewhere: x as one exact addend of a Partial sum."""
    return aten.mul.Tensor(x, ctx.index(axes) == 0) if axes else x


def partial_axes(ctx: LocalContext, spec: Spec) -> tuple[int, ...]:
    """Mesh axes over which a tensor is Partial; an axis of one rank does not count."""
    return tuple(i for i, p in enumerate(spec) if is_partial(p) and ctx.ranks((i,)) > 1)


def shard_axes(ctx: LocalContext, spec: Spec) -> tuple[int, ...]:
    """Mesh axes that split any dim; an axis of one rank does not count."""
    return tuple(i for i, p in enumerate(spec) if is_shard(p) and ctx.ranks((i,)) > 1)
