"""Gradients of a program can be had once: whoever differentiates them is told."""
from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from autoshard.errors import UsageError


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For the backward of an autograd function that keeps as `ctx.leaves` what its gradients go to; as torch's `once_differentiable`. That one
    lets gradients through as constants where what arrives needs no gradient (the model's result was summed, say): a gradient penalty would
    have no gradient, without a word."""
    @wraps(backward)
    def run(ctx: Any, *tangents: torch.Tensor) -> Any:
        with torch.no_grad():
            grads = backward(ctx, *tangents)
        if not torch.is_grad_enabled():
            return grads
        return tuple(g if g is None else _Last.apply(g, *ctx.leaves) for g in grads)

    return run


class _Last(torch.autograd.Function):
    """The gradient itself. It depends on the leaves, nobody knows how."""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, *leaves: torch.Tensor) -> torch.Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> Any:
        raise UsageError("a gradient of the compiled model is differentiated (create_graph=True: a gradient penalty, a Hessian), and its programs "
                         "have no second backward: compute that term on the model itself, or with torch.func.grad and jvp inside of forward")
