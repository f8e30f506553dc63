"""Copies of a model and its inputs in another dtype."""
from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autoshard import _torch
from autoshard._torch import pytree
from autoshard.errors import UsageError
from autoshard.program.tracing.twin import kept_results, own_functions


def own_copy(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A copy whose floating parameters and buffers are in `dtype` (None: as they are), complex ones as precise. Raises UsageError for a model
    without values."""
    virtual = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    if virtual:
        raise UsageError(f"verify needs real weights, and {virtual[0]} is on the meta device ({len(virtual)} tensors in all); "
                         "build the model outside torch.device('meta')")
    kept = {key: t.clone() for key, t in kept_results(model).items()}
    try:
        twin = own_functions(copy.deepcopy(model, kept), kept)
    except Exception as e:
        raise UsageError(f"the model cannot be copied ({type(e).__name__}: {str(e).strip()[:120]}); keep objects that cannot be copied out of "
                         "module attributes") from None
    return twin if dtype is None else _torch.convert(twin, lambda t: t.to(_precise(t.dtype, dtype)))


def cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """Every floating tensor of a pytree in `dtype`, complex ones as precise. Raises UsageError for tensors without values."""
    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.is_meta:
            raise UsageError("verify needs real example inputs, and one is on the meta device")
        moved = leaf.detach() if dtype is None else leaf.detach().to(_precise(leaf.dtype, dtype))
        return moved.requires_grad_(leaf.requires_grad)

    return pytree.tree_map(one, tree)


def _precise(old: torch.dtype, wanted: torch.dtype) -> torch.dtype:
    """What a tensor of `old` becomes where floats become `wanted`."""
    if old.is_complex:
        return {torch.float64: torch.complex128, torch.float32: torch.complex64}.get(wanted, old)
    return wanted if old.is_floating_point else old


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Tensors that the model makes without a dtype are as precise as its weights."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
