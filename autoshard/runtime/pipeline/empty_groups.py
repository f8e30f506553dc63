"""Groups of an optimizer in a pipeline: a rank has those of all stages, and in some of them no parameter.

Saved by name (`flatten_optimizer_state_dict=True`) a group's settings stand beside its parameters. torch 2.13 takes them from the first one and fails
with an IndexError where there is none, so it is asked about the other groups."""
from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from autoshard import _torch


@cache
def load_empty_groups() -> None:
    """Once per process: a group without parameters keeps its settings when states by name are loaded."""
    _torch.on_flat_optimizer_states(lambda theirs: partial(_grouped, theirs))


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
