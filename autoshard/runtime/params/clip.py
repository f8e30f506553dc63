"""The norm of all gradients of a compiled model, and clipping by it.

`torch.nn.utils.clip_grad_norm_` sees the parameters of this rank's stages alone, so in a pipeline every stage would get a norm of its own."""
from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from autoshard.errors import UsageError


@torch.no_grad()
def clip_grad_norm_(model: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale the gradients of a compiled model in place so that their norm is at most `max_norm`; returns the norm that they had.

    The norm is that of all parameters on all ranks, a parameter that several pipeline stages have counted once, and it is the same number
    on every rank. All ranks call it together. Raises UsageError for a model that autoshard did not compile."""
    place = getattr(model, "place", None)
    if place is None or not hasattr(model, "is_first_holder"):
        raise UsageError(f"clip_grad_norm_ takes a model from autoshard.compile, not a {type(model).__name__}; use torch.nn.utils.clip_grad_norm_")
    named = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
    total = _total([g for n, g in named if model.is_first_holder(n)], float(norm_type), place.device)
    if place.device_mesh is not None:
        for axis in place.mesh.names:
            dist.all_reduce(total, dist.ReduceOp.MAX if norm_type == inf else dist.ReduceOp.SUM, group=place.device_mesh.get_group(axis))
    norm = (total if norm_type == inf else total ** (1.0 / norm_type)).to(_widest(model))
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for _, g in named:
        local = g._local_tensor if isinstance(g, DTensor) else g
        local.mul_(factor.to(local.device, local.dtype))
    return norm


def _total(grads: Sequence[torch.Tensor], p: float, device: torch.device) -> torch.Tensor:
    """The sum over elements of |g|^p, divided among the ranks that hold the same elements; for p = inf their largest. In float64 on every rank,
    which goes into one reduction: stages may have gradients of other dtypes than others, or none where all of a rank's parameters are frozen."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for g in grads:
        local, copies = _own(g)
        wide = torch.promote_types(g.dtype, torch.float32)
        size = torch.linalg.vector_norm(local, p, dtype=wide).to(total) if local.numel() else torch.zeros_like(total)
        total = torch.maximum(total, size) if p == inf else total + size ** p / copies
    return total


def _widest(model: Any) -> torch.dtype:
    """Of this rank's parameters, at least float32."""
    found = [p.dtype.to_real() for p in model.parameters() if p.dtype.is_floating_point or p.dtype.is_complex]
    return max([torch.float32, *found], key=lambda d: torch.finfo(d).bits)


def _own(g: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The local part, and how many ranks hold the same."""
    if not isinstance(g, DTensor):
        return g, 1
    return g._local_tensor, prod(n for n, p in zip(g.device_mesh.shape, g.placements, strict=True) if isinstance(p, Replicate))
