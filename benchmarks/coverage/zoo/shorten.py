"""A model of a library with fewer of its repeated blocks: what a third block of a kind adds to a check is its time."""
from __future__ import annotations

import copy
from itertools import groupby
from typing import Any

import torch
from torch import nn

KEPT = 2
"""Of each run of equal blocks: where every other one differs in what its text does not say (windows that shift), one of both."""


def without_noise(model: nn.Module) -> nn.Module:
    """No dropout and no dropped paths: random numbers would be compared by their shapes alone."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) or type(module).__name__ in ("DropPath", "StochasticDepth"):
            module.p = module.drop_prob = 0.0
    return model


def shortened(model: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
    """A copy with at most two blocks of each run of equal ones in a Sequential or ModuleList. The model itself where it does not run without the
    others: some count their blocks elsewhere."""
    short = copy.deepcopy(model)
    for container in [m for m in short.modules() if isinstance(m, nn.Sequential | nn.ModuleList)]:
        runs = [list(run) for _, run in groupby(container.named_children(), key=lambda child: repr(child[1]))]
        kept = [child for run in runs for child in run[:KEPT]]
        container._modules = {str(i) if isinstance(container, nn.ModuleList) else name: block for i, (name, block) in enumerate(kept)}
    try:
        with torch.no_grad():
            short(*inputs)
    except Exception:  # whatever it raises, the whole model is the answer
        return model
    return short
