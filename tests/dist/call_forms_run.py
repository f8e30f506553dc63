"""One call of a compiled module against the same call in eager mode: result, gradients of parameters and inputs."""
from __future__ import annotations

from typing import Any

import torch
from call_forms import Case
from torch import nn
from torch.utils import _pytree as pytree

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 5e-2}


def check(label: str, compiled: nn.Module, found: Case, args: tuple[Any, ...], kwargs: dict[str, Any], piece: Any = lambda t: t,
          scale: float = 1.0) -> None:
    """`piece`: what this rank passes of a tensor, and gets a gradient of that is `scale` times as large."""
    label = f"{label}: args {pytree.tree_map(_short, args)}, kwargs {pytree.tree_map(_short, kwargs)}"
    whole = pytree.tree_map(_fresh, (args, kwargs))
    mine = pytree.tree_map(lambda v: piece(v).detach().requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v, whole)
    found.model.zero_grad(), compiled.zero_grad()
    got, want = compiled(*mine[0], **mine[1]), _eager(found, *whole)
    same(f"{label}: result", got, want)
    assert got.requires_grad == want.requires_grad, f"{label}: requires_grad"
    if want.requires_grad:
        got.sum().backward(), want.sum().backward()
    for (name, a), b in zip(compiled.named_parameters(), found.model.parameters(), strict=True):
        same_gradient(f"{label}: gradient of {name}", a.grad, b.grad)
    for a, b in zip(pytree.tree_leaves(mine), pytree.tree_leaves(whole), strict=True):
        if isinstance(a, torch.Tensor):
            same_gradient(f"{label}: gradient of an input {_short(b)}", a.grad, None if b.grad is None else piece(b.grad) * (scale if piece(b.grad).ndim else 1))


def _eager(found: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    if found.loss_fn is None:
        return found.model(*args, **kwargs)
    if "target" in kwargs:
        return found.loss_fn(found.model(*args, **{k: v for k, v in kwargs.items() if k != "target"}), kwargs["target"])
    return found.loss_fn(found.model(*args[:-1], **kwargs), args[-1])


def same_gradient(label: str, got: torch.Tensor | None, want: torch.Tensor | None) -> None:
    if want is None or got is None:
        assert got is None or not got.count_nonzero(), f"{label}: {got} instead of {want}"
        assert want is None or not want.count_nonzero(), f"{label}: {got} instead of {want}"
        return
    same(label, got, want)


def same(label: str, got: torch.Tensor, want: torch.Tensor) -> None:
    got = (got.full_tensor() if hasattr(got, "full_tensor") else got).detach()
    assert got.shape == want.shape and got.dtype == want.dtype, f"{label}: {got.shape} {got.dtype}, wanted {want.shape} {want.dtype}"
    off = (got.double() - want.detach().double()).norm().item()
    assert off <= TOLERANCE[got.dtype] * max(want.detach().double().norm().item(), 1e-6), f"{label}: off by {off:.3e}"


def _fresh(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _short(value: Any) -> Any:
    return f"{tuple(value.shape)} {str(value.dtype)[6:]}{' grad' * value.requires_grad}" if isinstance(value, torch.Tensor) else value
