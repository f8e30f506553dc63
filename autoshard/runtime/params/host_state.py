"""Optimizer state in the host's memory: which parameters have it, and its transfer to the device for an update.

A plan may keep the state of some parameters on the host (`Plan.offload`). The compiled model marks these parameters; the
optimizer that `local_update` has wrapped updates each of them alone: its state comes to the device, torch's own step runs, the
state goes back. So the device never holds more than one parameter's, and numbers are those of any other step. Host memory is pinned
where the device is a GPU. Where the device is the CPU all is done alike, between two places of the same memory.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoshard import _torch
from autoshard.errors import UsageError

HOST = "autoshard_state_on_host"
"""Attribute of a parameter: True where its state belongs on the host, False where it did and may lie there still."""
LOCAL = "autoshard_local_update"
"""Attribute of an optimizer that `local_update` has wrapped."""


def keep_on_host(params: Mapping[str, Tensor], names: Iterable[str], afresh: bool) -> None:
    """Mark the parameters whose state belongs on the host from the next step on. What was marked before stays, unless `afresh`."""
    wanted = frozenset(names)
    for name, p in params.items():
        if name in wanted:
            setattr(p, HOST, True)
        elif afresh and hasattr(p, HOST):
            setattr(p, HOST, False)
    if wanted:
        _watch_steps()


def is_marked(p: Tensor) -> bool:
    """Whether the state of a parameter lies, or has to lie, on the host."""
    return hasattr(p, HOST)


@cache
def _watch_steps() -> None:
    """Once per process: an optimizer that would make all state on the device must not do so unnoticed."""
    register_optimizer_step_pre_hook(_refuse_others)


def _refuse_others(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    if hasattr(optimizer, LOCAL):
        return
    marked = sum(getattr(p, HOST, False) for group in optimizer.param_groups for p in group["params"])
    if marked:
        raise UsageError(f"the plan keeps the optimizer state of {marked} parameters on the host, and {type(optimizer).__name__} by itself "
                         "keeps it on the device; use optimizer = autoshard.local_update(optimizer)")


def update_alone(optimizer: optim.Optimizer, group: dict[str, Any], piece: Tensor, owner: Tensor) -> None:
    """One step of `optimizer` for `piece`, a marked parameter or the local piece of one (`owner`), with its state on the device
    meanwhile."""
    if piece.grad is None:
        return
    state = optimizer.state.get(piece, {})
    host = {name: t for name, t in state.items() if _is_like(t, piece) and t.device.type == "cpu"}
    for name, t in host.items():
        state[name] = torch.empty_like(t, device=piece.device).copy_(t, non_blocking=True)
    groups, params = optimizer.param_groups, group["params"]
    optimizer.param_groups, group["params"] = [group], [piece]
    try:
        kind: Any = type(optimizer)
        kind.step.__wrapped__(optimizer)  # without the hooks around it
    finally:
        optimizer.param_groups, group["params"] = groups, params
    if not getattr(owner, HOST):
        delattr(owner, HOST)  # at home on the device again
        return
    state = optimizer.state.get(piece, {})
    for name, t in state.items():
        if _is_like(t, piece):
            state[name] = host[name].copy_(t) if name in host else to_host(t)  # waits: the host may read it next


def rest(optimizer: optim.Optimizer) -> None:
    """Bring state that belongs on the host there. Loading takes it by way of the device; some optimizers make it beforehand."""
    for p, state in optimizer.state.items():
        for name, value in state.items() if getattr(p, HOST, False) else ():
            local = value.to_local() if isinstance(value, DTensor) else value
            if _is_like(value, p) and local.device.type != "cpu":
                state[name] = _torch.dtensor_like(to_host(local), value) if isinstance(value, DTensor) else to_host(local)


def to_host(t: Tensor) -> Tensor:
    """A copy in the host's memory, pinned where `t` is on a GPU."""
    return torch.empty_like(t, device="cpu", pin_memory=t.is_cuda).copy_(t)


def _is_like(value: Any, p: Tensor) -> bool:
    """Whether a value of the state has an element for each of the parameter: counters have not, and stay where they are."""
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape == p.shape
