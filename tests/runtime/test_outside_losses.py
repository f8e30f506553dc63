"""What a loss that is an object reads of itself gives another variant when it changes; what it counts does not."""
from __future__ import annotations

from typing import Any

import torch
from torch import nn

import autoshard


class Loss:
    """Its method `mean` has the name of what it calls on a tensor."""

    def __init__(self) -> None:
        self.weight, self.total, self.calls = 1.0, 0.0, 0

    def __call__(self, out: torch.Tensor, target: torch.Tensor) -> Any:
        self.calls += 1
        return self.weighed((out - target).square().mean())

    def weighed(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.weight

    def mean(self) -> float:
        return self.total / self.calls


def test_methods_named_as_those_of_tensors_are_not_taken_for_them() -> None:
    loss, model, x = Loss(), nn.Linear(4, 4), torch.randn(2, 4)
    fast = autoshard.compile(model, "one=1", loss_fn=loss, training=False, cluster="cpu-gloo", cache=False)
    for weight in (1.0, 2.0, 1.0, 2.0):
        loss.weight = weight
        value = fast(x, x)
        assert torch.allclose(value, loss(model(x), x))
        loss.total += value.item()
    assert len(fast._steps) == 2
