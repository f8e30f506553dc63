"""PipeDream's recurrence in one process: w(t + 1) = w(t) - lr grad f(w_1(t - n + 1), ..., w_n(t)), or the step of another optimizer with that gradient."""
from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call


def trained(model: nn.Module, stage_of: Mapping[str, int], batches: Sequence[tuple[torch.Tensor, ...]], loss: Any,
            optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and the weights behind the last update. `stage_of` a parameter, from 0."""
    model, n = copy.deepcopy(model), max(stage_of.values()) + 1
    params = dict(model.named_parameters())
    own = optimizer(list(params.values()))
    versions, losses = [{name: p.detach().clone() for name, p in params.items()}], []
    for t, batch in enumerate(batches):
        seen = {name: versions[max(0, t - n + stage_of[name] + 1)][name].clone().requires_grad_() for name in params}
        found = loss(functional_call(model, seen, batch[:-1]), batch[-1])
        for (name, p), g in zip(params.items(), torch.autograd.grad(found, list(seen.values())), strict=True):
            p.grad = g
        own.step()
        losses.append(found.item())
        versions.append({name: p.detach().clone() for name, p in params.items()})
    return losses, versions[-1]
