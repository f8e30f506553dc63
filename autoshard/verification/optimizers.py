"""Optimizers that a verification can step with: those that treat every element alike, so that pieces may be parameters."""
from __future__ import annotations

from functools import partial
from typing import Any

import torch

from autoshard.cost.optimizers import verified
from autoshard.errors import UsageError
from autoshard.verification.one_process.program import MakeOptimizer


def optimizer_of(optimizer: Any) -> MakeOptimizer:
    """A function of a list of parameters. Raises UsageError."""
    if callable(optimizer):
        made: MakeOptimizer = optimizer
        return made
    if optimizer not in verified():
        raise UsageError(f"optimizer={optimizer!r} is none of {', '.join(verified())}, nor a function of a list of parameters")
    row = verified()[optimizer]
    return partial(getattr(torch.optim, row.torch), **row.verified_with or {})
