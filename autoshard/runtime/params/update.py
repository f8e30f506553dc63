"""An optimizer's step on each rank's own pieces, without DTensor dispatch.

Every op of `optimizer.step()` on a DTensor goes through a dispatcher, some 20 us each and a dozen ops per parameter:
3 % of a step of a second with 70 parameters. An update that treats every element alone gives the same numbers on the
pieces, so for such optimizers the parameters are swapped for their pieces while `step()` runs. Parameters whose
state a plan keeps on the host are updated before the others, one by one (host_state.py).
"""
from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoshard import _torch
from autoshard.cost.optimizers import elementwise_classes
from autoshard.errors import UsageError
from autoshard.runtime.params import host_state
from autoshard.runtime.params.strided import cut

ELEMENTWISE = tuple(getattr(optim, name) for name in elementwise_classes())
FUSED = {optim.SGD: torch.ops.aten._fused_sgd_.default, optim.Adagrad: torch.ops.aten._fused_adagrad_.default}
"""Fused updates that torch may not have for DTensors; it has those of Adam and AdamW."""


def local_update(optimizer: optim.Optimizer) -> optim.Optimizer:
    """Make `optimizer.step()` work on every rank's own pieces of the DTensor parameters; returns the optimizer.

    Between steps nothing changes: parameters, gradients and state are DTensors, for checkpoints and schedulers. A step
    with a closure runs as before. Where the plan keeps state on the host (`offload="optimizer"`), the state is made and kept there,
    and is on the device for its parameter's update alone. Raises UsageError for an optimizer whose update looks at whole tensors
    (norms, factors) and for subclasses, whose update is not known."""
    if type(optimizer) not in ELEMENTWISE:
        names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise UsageError(f"{type(optimizer).__name__} may look at more of a parameter than one element at a time, so it cannot "
                         f"update pieces alone; use it as it is, or one of {names}")
    swap = _Swap()
    optimizer.register_step_pre_hook(swap.enter)
    optimizer.register_step_post_hook(swap.leave)
    optimizer.register_load_state_dict_post_hook(host_state.rest)
    setattr(optimizer, host_state.LOCAL, True)
    host_state.rest(optimizer)
    return optimizer


@cache
def watch_steps() -> None:
    """Once per process: a fused step that torch cannot do with DTensors says what to do instead, and state of whole parameters is cut as they are."""
    register_optimizer_step_pre_hook(_refuse_fused)
    register_optimizer_step_pre_hook(_cut_whole_state)


def _refuse_fused(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    op = FUSED.get(type(optimizer))
    if op is None or hasattr(optimizer, host_state.LOCAL) or _torch.has_sharding_rule(op):
        return
    if any(group.get("fused") and any(isinstance(p, DTensor) for p in group["params"]) for group in optimizer.param_groups):
        name = type(optimizer).__name__
        raise UsageError(f"{name}(fused=True) updates all parameters by an op that torch has not for DTensors; use optimizer = "
                         f"autoshard.local_update(optimizer), which runs it on every rank's own pieces, or {name} without fused")


def _cut_whole_state(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    """As `load_state_dict` leaves that of a training on one device."""
    for p, state in optimizer.state.items():
        if not isinstance(p, DTensor):
            continue
        mesh = p.device_mesh
        for name, value in state.items():
            if type(value) is Tensor and value.ndim and value.shape == p.shape:
                state[name] = _torch.dtensor_like(cut(value, p.placements, mesh.shape, mesh.get_coordinate()).clone(), p)


class _Swap:
    """What stands aside while a step runs: by local piece, the DTensor it is a piece of; `groups`: the parameters of every group."""

    def __init__(self) -> None:
        self.groups: list[list[Tensor]] = []
        self.owners: dict[Tensor, DTensor] = {}
        self.wholes: dict[Tensor, DTensor] = {}

    @torch.no_grad()
    def enter(self, optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(value is not None for value in (*args[1:], *kwargs.values())):  # torch passes the optimizer first
            return self._refuse_host(optimizer)  # a closure computes with the parameters
        self.leave(optimizer)  # after a step that raised, the pieces are still in place
        self.groups = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [self._piece(p) for p in group["params"]]
        for piece, p in self.owners.items():
            if p in optimizer.state:
                optimizer.state[piece] = {name: self._local(value, p) for name, value in optimizer.state.pop(p).items()}
        self._update_marked(optimizer)

    @torch.no_grad()
    def leave(self, optimizer: optim.Optimizer, *_: Any) -> None:
        for group, params in zip(optimizer.param_groups, self.groups, strict=False):  # none after a step with a closure
            group["params"] = params
        for piece, p in self.owners.items():
            piece.grad = None
            if piece in optimizer.state:
                optimizer.state[p] = {name: self._whole(value, piece, p) for name, value in optimizer.state.pop(piece).items()}
        self.owners, self.wholes, self.groups = {}, {}, []

    def _update_marked(self, optimizer: optim.Optimizer) -> None:
        """Update the parameters whose state lies on the host, and leave the others to the step that follows."""
        for group in optimizer.param_groups:
            marked = {x: host_state.is_marked(self.owners.get(x, x)) for x in group["params"]}
            for x in (x for x, away in marked.items() if away):
                host_state.update_alone(optimizer, group, x, self.owners.get(x, x))
            group["params"] = [x for x, away in marked.items() if not away]

    def _refuse_host(self, optimizer: optim.Optimizer) -> None:
        if any(host_state.is_marked(p) for group in optimizer.param_groups for p in group["params"]):
            raise UsageError("a step with a closure cannot keep optimizer state on the host, where the plan has it; compute the loss "
                             "before the step, or plan without offload")

    def _piece(self, p: Tensor) -> Tensor:
        """The parameter's own piece, with its piece of the gradient; `p` itself where that is not enough."""
        if not isinstance(p, DTensor):
            return p
        grad = p.grad
        if grad is not None and grad.placements != p.placements:
            if not host_state.is_marked(p):
                return p
            grad = grad.redistribute(placements=p.placements)
        piece = p.to_local()
        piece.grad = None if grad is None else grad.to_local()
        self.owners[piece] = p
        return piece

    def _local(self, value: Any, p: DTensor) -> Any:
        """A piece of the state. What an optimizer made before the first call (Adagrad's sums) is whole still, and is cut as the parameter is."""
        if not isinstance(value, DTensor):
            return value
        if value.shape == p.shape and value.placements != p.placements:
            value = value.redistribute(p.device_mesh, p.placements)
        local = value.to_local()
        self.wholes[local] = value
        return local

    def _whole(self, value: Any, piece: Tensor, p: DTensor) -> Any:
        """New state of a piece's shape is a piece of a tensor like the parameter; counters and the like stay."""
        if not isinstance(value, Tensor) or value in self.wholes or value.shape != piece.shape:
            return self.wholes.get(value, value) if isinstance(value, Tensor) else value
        return _torch.dtensor_like(value, p)
