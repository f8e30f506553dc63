"""The norm of all gradients of a compiled model, and clipping by it.

`torch.nn.utils.clip_grad_norm_` sees the parameters of this rank's stages alone, so in a pipeline every stage would get a norm of its own: it is
told of pipelines (`pipelines`)."""
from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from math import inf, prod
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from autoshard import _torch
from autoshard.errors import UsageError


@torch.no_grad()
def clip_grad_norm_(model: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale the gradients of a compiled model in place so that their norm is at most `max_norm`; returns the norm that they had.

    The norm is that of all parameters on all ranks, a parameter that several pipeline stages have counted once, and it is the same number
    on every rank. All ranks call it together. Raises UsageError for a model that autoshard did not compile."""
    if getattr(model, "place", None) is None or not hasattr(model, "is_first_holder"):
        raise UsageError(f"clip_grad_norm_ takes a model from autoshard.compile, not a {type(model).__name__}; use torch.nn.utils.clip_grad_norm_")
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = _norm(model, grads, norm_type)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for g in grads:
        local = g._local_tensor if isinstance(g, DTensor) else g
        local.mul_(factor.to(local.device, local.dtype))
    return norm


@cache
def pipelines() -> WeakSet[Any]:
    """Those of this process. From the first one on `torch.nn.utils.clip_grad_norm_`, which sees the gradients of this rank's stages alone, takes the
    norm over all stages; every rank calls it, those whose stages have no gradient too."""
    alive: WeakSet[Any] = WeakSet()
    _torch.on_total_norm(lambda theirs: partial(_total_norm, alive, theirs))
    return alive


def _total_norm(alive: Collection[Any], theirs: Callable[..., torch.Tensor], tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False,
                foreach: bool | None = None) -> torch.Tensor:
    """In place of torch's function `theirs`, of the same arguments."""
    grads = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    model = _owner(alive, grads) if grads else _only_one(alive)
    if model is None:
        return theirs(grads, norm_type, error_if_nonfinite, foreach)
    with torch.no_grad():
        norm = _norm(model, grads, norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"the norm of order {norm_type} of the gradients of all stages is {norm.item()}, so they cannot be clipped; to clip with "
                           "it all the same set error_if_nonfinite=False")
    mesh = next((g.device_mesh for g in grads if isinstance(g, DTensor)), None)
    return norm if mesh is None else DTensor.from_local(norm, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _owner(alive: Collection[Any], grads: Sequence[torch.Tensor]) -> Any | None:
    """The pipeline whose gradients these are; None where they are of none. Raises UsageError where some are of a pipeline and some are not."""
    given = {id(g) for g in grads}
    own = {model: given & {id(p.grad) for p in model.parameters()} for model in alive}
    found = [model for model, ids in own.items() if ids]
    if found and own[found[0]] != given:
        raise UsageError("clip_grad_norm_ got gradients of a pipeline's parameters beside others, and a pipeline takes its norm over all of its "
                         "stages; clip each model's parameters in a call of its own")
    return found[0] if found else None


def _only_one(alive: Collection[Any]) -> Any | None:
    """The pipeline that trains, to whose norm a rank without gradients adds nothing; None if there is none. Raises UsageError for several."""
    if sum(model.trains for model in alive) > 1:
        gc.collect()  # those that the program has let go do not count
    found = [model for model in alive if model.trains]
    if len(found) > 1:
        raise UsageError(f"clip_grad_norm_ got no gradient on this rank, and {len(found)} pipelines that train are alive, so it is not known whose "
                         "norm the other ranks take; call autoshard.clip_grad_norm_(model, max_norm), or delete the pipelines that are done, and "
                         "freeze those that only evaluate (requires_grad_(False) before compile)")
    return found[0] if found else None


def _norm(model: Any, grads: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Of some gradients of a compiled model, over all ranks."""
    place, order, given = model.place, float(norm_type), {id(g) for g in grads}
    total = _total([p.grad for n, p in model.named_parameters() if id(p.grad) in given and model.is_first_holder(n)], order, place.device)
    if place.device_mesh is not None:
        for axis in place.mesh.names:
            dist.all_reduce(total, dist.ReduceOp.MAX if order == inf else dist.ReduceOp.SUM, group=place.device_mesh.get_group(axis))
    return (total if order == inf else total ** (1.0 / order)).to(_widest(model))


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
