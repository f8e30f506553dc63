"""Models that `copy.deepcopy` does not take as they are: `compile` copies them nevertheless."""
from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import autoshard


class Keeps(nn.Module):
    """Keeps results of a call, as models do for a loss of their experts, and a lock, which cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen, self.lock = nn.Linear(6, 4), [], threading.Lock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.linear(x)
        self.last, self.seen = made.mean(), [made]
        return made + self.last


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:forward")
@pytest.mark.parametrize("build", [Keeps, lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 4)), nn.Tanh())])
def test_a_model_that_keeps_tensors_of_an_earlier_call_is_compiled(build):
    torch.manual_seed(0)
    model, x = build().double(), torch.randn(8, 6, dtype=torch.float64)
    want = model(x)
    compiled = autoshard.compile(model, "d=1", cluster="cpu-gloo", cache=False)
    made = compiled(x)
    torch.testing.assert_close(made, want, rtol=1e-12, atol=1e-12)
    made.square().sum().backward()
    want.square().sum().backward()
    for name, p in compiled.named_parameters():
        torch.testing.assert_close(p.grad, model.get_parameter(name).grad, rtol=1e-12, atol=1e-12)
