"""Optimizers that a verification can step with: those that treat every element alike, so that pieces may be parameters."""
from __future__ import annotations

from typing import Any

import torch

from autoshard.errors import UsageError
from autoshard.verification.program import MakeOptimizer


def optimizer_of(optimizer: Any) -> MakeOptimizer:
    """A function of a list of parameters. Raises UsageError."""
    known: dict[str, MakeOptimizer] = {
        "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
        "adam": lambda p: torch.optim.Adam(p, lr=1e-3), "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3)}
    if callable(optimizer):
        return optimizer
    if optimizer not in known:
        raise UsageError(f"optimizer={optimizer!r} is none of {', '.join(known)}, nor a function of a list of parameters")
    return known[optimizer]
