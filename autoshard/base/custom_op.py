"""Ops of our own, which compilers call and do not look into."""
from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


def custom_op(name: str, signature: str, run: Callable[..., Any], shape: Callable[..., Any]) -> Any:
    """`torch.ops.autoshard.<name>.default`, defined now; once per name and process. `signature`: "(Tensor x, int n) -> Tensor";
    `shape`: the same arguments -> an empty result, for tensors without data."""
    _library().define(f"{name}{signature}")
    _library().impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autoshard::{name}", shape, lib=_library())
    return getattr(torch.ops.autoshard, name).default


def differentiable(name: str, save: Callable[..., None], backward: Callable[..., Any]) -> None:
    """Give an op that was defined here its gradient; the two functions are those of `torch.library.register_autograd`."""
    torch.library.register_autograd(f"autoshard::{name}", backward, setup_context=save, lib=_library())


@cache
def _library() -> torch.library.Library:
    return torch.library.Library("autoshard", "FRAGMENT")
