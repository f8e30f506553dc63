"""Gradients that are there before `backward()` is called: a call ran forward and backward of its micro-batches, since the loss is in the graph."""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from autoshard.errors import UsageError
from autoshard.runtime.inputs import plain_tangent
from autoshard.runtime.once import differentiable_once
from autoshard.runtime.unused import check_left_out

Finish = Callable[[list[torch.Tensor]], Sequence[torch.Tensor | None]]


def hand_out(outs: list[torch.Tensor], loss: int, grads: list[torch.Tensor], leaves: Sequence[torch.Tensor],
             finish: Finish, left_out: Collection[int] = ()) -> tuple[torch.Tensor, ...]:
    """`outs` as results of autograd's `leaves`. `backward()` multiplies the local gradients `grads` by what arrives at `outs[loss]`;
    `finish` makes of them a gradient for each leaf. The other results have no gradient; one that arrives at those `left_out` raises
    UsageError, and so does a second `backward()`."""
    result = _HandOut.apply(outs, loss, grads, finish, left_out, *leaves)
    return result if isinstance(result, tuple) else (result,)


def multiply(grads: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    """In place: each is in memory of its own."""
    for g in grads:
        g.mul_(factor)


class _HandOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outs: list[torch.Tensor], loss: int, grads: list[torch.Tensor], finish: Finish, left_out: Collection[int],
                *leaves: torch.Tensor) -> Any:
        ctx.loss, ctx.grads, ctx.finish, ctx.left_out, ctx.leaves = loss, grads, finish, left_out, leaves
        ctx.mark_non_differentiable(*(t for i, t in enumerate(outs) if i != loss and i not in left_out))
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *tangents: torch.Tensor) -> Any:
        check_left_out(tangents, ctx.left_out)
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise UsageError("backward() of this loss ran before; a step of micro-batches hands out gradients once, so add losses up "
                             "before backward()")
        tangent = plain_tangent(tangents[ctx.loss])
        if tangent.device.type != "cpu" or tangent.item() != 1.0:
            multiply(grads, tangent)
        return (None,) * 5 + tuple(ctx.finish(grads))
