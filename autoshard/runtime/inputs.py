"""From what the user passes to local tensors, and from local outputs to what the user gets."""
from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from autoshard import _torch
from autoshard._torch import pytree
from autoshard.base.graph import TensorMeta
from autoshard.base.spec import R, Spec, format_spec
from autoshard.decide.options import Passing
from autoshard.errors import MeshError, PlanError, UsageError
from autoshard.program.calling import as_stored
from autoshard.program.output_modes import DTENSOR
from autoshard.program.taken import check_dense
from autoshard.runtime.params.strided import placements
from autoshard.runtime.ranks.place import Place


def spec_given(passing: Passing, t: torch.Tensor, place: Place) -> Spec | None:
    """The placement an input comes in; None when this rank has it whole. Raises UsageError for one that a transform or a tracer looks at."""
    if _torch.is_transformed(t) or torch.jit.is_tracing():
        raise UsageError(f"a compiled model is called {_by(t)}, which cannot see into its programs; call the model itself there, or do that "
                         "inside of the forward that is compiled: torch.func's grad, vmap and jvp work there")
    if isinstance(t, DTensor):
        return _spec_of(t, place)
    if passing.inputs == "local" and t.ndim and place.mesh.size > 1:  # of one rank the part is the whole
        return batch_spec(passing, place)
    return None


def _by(t: torch.Tensor) -> str:
    if torch.jit.is_tracing():
        return "by torch.jit.trace"
    return "inside of a transform of torch.func (grad, vmap, jvp) or with a tangent of forward-mode AD"


def batch_spec(passing: Passing, place: Place) -> Spec:
    """How dim 0 of a local batch is split."""
    chosen = {place.mesh.index(a) for a in passing.batch_axes or place.mesh.names[:1]}
    return tuple(0 if i in chosen else R for i in range(place.mesh.ndim))


def _spec_of(t: DTensor, place: Place) -> Spec:
    if t.device_mesh != place.device_mesh:
        raise MeshError(f"an input is a DTensor on {t.device_mesh}, the model is compiled for mesh {place.mesh}; use one mesh")
    if any(p.is_partial() for p in t.placements):
        raise UsageError(f"an input is a DTensor with placements {t.placements}; redistribute Partial inputs first")
    if not all(isinstance(p, (Shard, Replicate)) for p in t.placements):
        raise UsageError(f"an input is a DTensor with placements {t.placements}; redistribute it to Shard and Replicate first")
    return tuple(p.dim if isinstance(p, Shard) else R for p in t.placements)


def as_global(t: torch.Tensor, spec: Spec | None, place: Place) -> torch.Tensor:
    """A stand-in with the input's global shape, for tracing."""
    check_dense(t)
    if spec is None or isinstance(t, DTensor):
        return torch.empty(t.shape, dtype=t.dtype, device="meta").requires_grad_(t.requires_grad)
    shape = place.whole_shape(tuple(t.shape), spec)
    return torch.empty(shape, dtype=t.dtype, device="meta").requires_grad_(t.requires_grad)


def localize(t: torch.Tensor, given: Spec | None, wanted: Spec, place: Place) -> torch.Tensor:
    """The local tensor that the plan reads. Raises UsageError when the plan wants another placement than the
    one the input comes in."""
    if t.is_meta:
        raise UsageError(f"an input of shape {tuple(t.shape)} is on the meta device and has no numbers to compute with; pass it on {place.device} "
                         "(prepare() and example_inputs take meta tensors)")
    if given is None:
        if t.device != place.device:
            t = t.to(place.device, non_blocking=True)
        if t.requires_grad:
            t = t.detach()
        return as_stored(place.slice(t, wanted))
    if given != wanted:
        raise UsageError(f"an input comes in as {format_spec(given)} and the plan reads it as {format_spec(wanted)}; "
                         "the plan was made for other inputs, plan again")
    local = t._local_tensor if isinstance(t, DTensor) else t
    return as_stored(local.detach().to(place.device))


def wrap_output(local: torch.Tensor, spec: Spec, meta: TensorMeta, mode: str, place: Place) -> torch.Tensor:
    """A user output: the local tensor, or a DTensor over it, whose placements count dims of the tensor."""
    if mode != DTENSOR or place.device_mesh is None:
        return local
    dims = meta.on_tensor_dims(spec)
    if dims is None:
        raise PlanError(f"an output of shape {meta.shape} is planned as {format_spec(spec)} over the factors {meta.factors}, which is no "
                        "placement of a DTensor; plan the model again")
    stride = torch.empty(meta.shape, device="meta").stride()
    placed = placements(dims, place.mesh.sizes)
    return DTensor.from_local(local, place.device_mesh, placed, run_check=False, shape=torch.Size(meta.shape), stride=stride)


def plain_tangent(t: torch.Tensor) -> torch.Tensor:
    """What arrives at a plain output. A DTensor where the output was computed on with DTensors, as a loss to which a penalty on weights is added."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def shard_batch(batch: Any, model: Any) -> Any:
    """Each rank's piece of a batch that all ranks have: dim 0 of every tensor, cut over the model's batch axes.
    Raises UsageError when dim 0 does not divide."""
    place, spec = model.place, batch_spec(model.passing, model.place)
    pieces = 1
    for size, p in zip(place.mesh.sizes, spec, strict=True):
        pieces *= size if p == 0 else 1

    def cut(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or not t.ndim:
            return t
        if t.shape[0] % pieces:
            raise UsageError(f"a batch of {t.shape[0]} does not split over {pieces} ranks; choose a multiple")
        return place.slice(t, spec)

    return pytree.tree_map(cut, batch)
