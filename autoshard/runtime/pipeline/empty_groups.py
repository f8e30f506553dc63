"""Groups of an optimizer in a pipeline: a rank has those of all stages, and in some of them no parameter.

Where a rank's stages are frozen, an optimizer of what is trained has no parameter at all there, which torch refuses: the rank would end with an
error of torch's, and the others would wait for it. There it gets one group without parameters.

Saved by name (`flatten_optimizer_state_dict=True`) a group's settings stand beside its parameters. torch 2.13 takes them from the first one and fails
with an IndexError where there is none, so it is asked about the other groups."""
from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any

import torch

from autoshard import _torch
from autoshard.runtime.params.clip import pipelines

log = logging.getLogger("autoshard")


@cache
def make_empty_optimizers() -> None:
    """Once per process: an optimizer without parameters can be made while a pipeline trains."""
    theirs = torch.optim.Optimizer.__init__

    @wraps(theirs)
    def made(optimizer: torch.optim.Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        given = params if isinstance(params, torch.Tensor) else list(params)
        if isinstance(given, list) and not given and any(model.trains for model in pipelines()):
            log.warning("a %s got no parameter on this rank, where no stage has one of those that were chosen: it updates nothing here. If this "
                        "comes on all ranks, look at how they are chosen", type(optimizer).__name__)
            given = [{"params": []}]
        theirs(optimizer, given, defaults)

    torch.optim.Optimizer.__init__ = made  # type: ignore[method-assign]


@cache
def load_empty_groups() -> None:
    """Once per process: a group without parameters keeps its settings when states by name are loaded, and an optimizer without any adds none."""
    _torch.on_flat_optimizer_states(lambda theirs: partial(_asked, theirs), lambda theirs: partial(_grouped, theirs))


def _asked(theirs: Callable[..., Any], model: Any, optimizers: tuple[torch.optim.Optimizer, ...], *args: Any, **kwargs: Any) -> Any:
    """In place of torch's function `theirs`, of the same arguments, which takes a state without a name for a mistake."""
    info = theirs(model, optimizers, *args, **kwargs)
    if info.flatten_optimizer_state_dict and not any(group["params"] for optimizer in optimizers for group in optimizer.param_groups):
        info.handle_optim = False
    return info


def _grouped(theirs: Callable[..., dict[str, Any]], optimizer: torch.optim.Optimizer, state_dict: Any, info: Any) -> dict[str, Any]:
    """In place of torch's function `theirs`, of the same arguments."""
    every = optimizer.param_groups
    optimizer.param_groups = [group for group in every if group["params"]]
    try:
        loaded = theirs(optimizer, state_dict, info)
    finally:
        optimizer.param_groups = every
    filled = iter(loaded["param_groups"])
    loaded["param_groups"] = [next(filled) if group["params"] else {**group, "params": []} for group in every]
    return loaded
