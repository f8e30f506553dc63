"""Grouped matmuls: every group of rows meets the matrix of its own expert; `offs` holds where groups end.

Splitting the experts: a rank turns the rows so that those of its first expert come first, runs its own
groups, and turns the result back with zeros elsewhere, so outputs over rows are Partial. Rows themselves
do not split: groups would straddle the cut."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from autoshard.base.graph import Call, TensorMeta
from autoshard.rules.family import Family
from autoshard.rules.notation import NotationMismatch, rule
from autoshard.rules.parts import addressed, input_axes, output_axes, zero_where_not
from autoshard.rules.types import LocalContext, Rule

aten = torch.ops.aten


def _count(like: Any, n: int) -> Any:
    """0 .. n-1 on the device of `like`, in its dtype."""
    return aten.sub.Scalar(aten.cumsum.default(aten.new_ones.default(like, [n]), 0, dtype=torch.int64), 1)


class _Turn:
    """The rows of this rank's experts, moved to the front and back."""

    def __init__(self, ctx: LocalContext, offs: Any, axes: Sequence[int], experts: int, rows: int) -> None:
        mine = aten.add.Tensor(_count(offs, experts), ctx.index(axes) * experts)
        begins = aten.cat.default([aten.new_zeros.default(offs, [1]), offs])
        self.start = aten.index_select.default(begins, 0, aten.slice.Tensor(mine, 0, 0, 1))
        self.offs = aten.sub.Tensor(aten.index_select.default(offs, 0, mine), self.start)
        self.count = _count(offs, rows)
        self.rows = rows
        end = aten.slice.Tensor(self.offs, 0, experts - 1)
        self.used = aten.lt.Tensor(self.count, end)

    def forth(self, x: Any, dim: int = 0) -> Any:
        ids = aten.remainder.Scalar(aten.add.Tensor(self.count, self.start), self.rows)
        return aten.index_select.default(x, dim, ids)

    def back(self, y: Any) -> Any:
        """Zeros where this rank's experts have no rows: the op leaves those unset."""
        ids = aten.remainder.Scalar(aten.sub.Tensor(self.count, self.start), self.rows)
        return aten.index_select.default(zero_where_not(y, aten.unsqueeze.default(self.used, 1)), 0, ids)


ROW_BYTES = 16
"""What torch's grouped matmul wants the distance of two rows to be a multiple of, in whichever dim the memory runs."""


def _grain(call: Call) -> list[dict[int, int]]:
    """Of both matrices the last two dims: whichever of them is innermost in memory has rows of whole units then."""
    def of(meta: TensorMeta) -> dict[int, int]:
        return {i: ROW_BYTES // meta.dtype.itemsize for d in (-2, -1) for i in meta.logical_dims(len(meta.shape) + d)}

    return [of(m) if i < 2 else {} for i, m in enumerate(call.inputs)]


def _laid_out(x: Any, shape: Sequence[int], itemsize: int) -> Any:
    """Innermost in memory a dim whose rows are whole units: one that a redistribution has laid out anew may have the other."""
    rows, columns = (n * itemsize % ROW_BYTES == 0 for n in shape[-2:])
    if columns and not rows:
        return aten.contiguous.default(x)
    if rows and not columns:
        return aten.transpose.int(aten.contiguous.default(aten.transpose.int(x, -2, -1)), -2, -1)
    return x


def _grouped_line(call: Call) -> str:
    a, b = (len(m.shape) for m in call.inputs[:2])
    if (a, b) == (2, 3):
        return "m! k, e k n, g!, -> m! n"
    if (a, b) == (2, 2):
        return "k m!, m! n, g!, -> e k n"
    raise NotationMismatch("grouped matmul of other shapes")


def _grouped(ctx: LocalContext, a: Any, b: Any, offs: Any = None, *rest: Any, **kwargs: Any) -> Any:
    products = len(ctx.call.inputs[1].shape) == 3
    axes = input_axes(ctx, 1, 0) if products else output_axes(ctx, 0, 0)

    def multiply(a: Any, b: Any, offs: Any) -> Any:
        a, b = (_laid_out(x, ctx.local_in(i), ctx.call.inputs[i].dtype.itemsize) for i, x in enumerate((a, b)))
        return ctx.call.target(a, b, offs, *rest, **kwargs)

    if not axes:
        return multiply(a, b, offs)
    if products:
        turn = _Turn(ctx, offs, axes, ctx.local_in(1)[0], ctx.local_in(0)[0])
        return turn.back(multiply(turn.forth(a), b, turn.offs))
    turn = _Turn(ctx, offs, axes, ctx.local_out(0)[0], ctx.local_in(1)[0])
    return multiply(turn.forth(a, 1), turn.forth(b), turn.offs)


def grouped_flops(call: Call, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """2 x rows x k x n, times the share of experts held: groups are taken to be equally large."""
    a, b = (m.unflatten(x) for m, x in zip(call.inputs[:2], inputs, strict=False))
    if len(b) == 3:
        return 2.0 * prod(a) * b[2] * b[0] / max(call.inputs[1].shape[0], 1)
    return 2.0 * prod(a) * b[1] * outputs[0][0] / max(call.output().shape[0], 1)


# The fallback of Hugging Face transformers where torch's own op does not apply ---------------------------

def _fallback(ctx: LocalContext, x: Any, weight: Any, offs: Any) -> Any:
    axes = input_axes(ctx, 1, 0)
    if not axes:
        return ctx.call.target(x, weight, offs)
    turn = _Turn(ctx, offs, axes, ctx.local_in(1)[0], ctx.local_in(0)[0])
    return turn.back(ctx.call.target(turn.forth(x), weight, turn.offs))


def _fallback_backward(ctx: LocalContext, x: Any, weight: Any, offs: Any, grad: Any) -> Any:
    axes = input_axes(ctx, 1, 0)
    if not axes:
        return ctx.call.target(x, weight, offs, grad)
    turn = _Turn(ctx, offs, axes, ctx.local_in(1)[0], ctx.local_in(0)[0])
    grad_x, grad_weight = ctx.call.target(turn.forth(x), weight, turn.offs, turn.forth(grad))
    return turn.back(grad_x), grad_weight


def _backward_flops(call: Call, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """Two products of the forward's size."""
    return 2.0 * grouped_flops(call, inputs, outputs)


def _rule(line: str | Callable[[Call], str], local: Any, flops: Any = grouped_flops) -> Rule:
    """Experts are looked up by number, where they have a dim of their own."""
    base = rule(line, family=Family.MATMUL, local=local, flops=flops)
    return addressed(base, 1, lambda call: [0] if len(call.inputs[1].shape) == 3 else [])


RULES = {aten._grouped_mm.default: replace(_rule(_grouped_line, _grouped), grain=_grain)}

BY_NAME = {
    "transformers.grouped_mm_fallback.default": _rule("m! k, e k n, g! -> m! n", _fallback),
    "transformers.grouped_mm_fallback_backward.default": _rule("m! k, e k n, g!, m! n -> m! k, e k n",
                                                               _fallback_backward, _backward_flops),
}
"""Rules of ops that exist only once another package is imported, by their printed name."""
