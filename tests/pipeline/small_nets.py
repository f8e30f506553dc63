"""Nets of two linear layers, as micro-batches and as the batch."""
from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

import autoshard
from autoshard import Pipeline

ROWS = 12


class Net(nn.Module):
    """Linear layers around `middle`."""

    def __init__(self, middle: Callable[[torch.Tensor], torch.Tensor] = torch.relu, out: int = 5) -> None:
        super().__init__()
        self.a, self.b, self.middle = nn.Linear(6, 8), nn.Linear(8, out), middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.middle(self.a(x)))


def made(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    return model.double()


def both(model: nn.Module, batch: tuple, loss_fn: Callable, count: int, **options: object) -> tuple[nn.Module, nn.Module, torch.Tensor, torch.Tensor]:
    """The compiled model and the model, after backward of each, with their losses."""
    whole = made(model)
    compiled = autoshard.compile(copy.deepcopy(whole), "d=1", loss_fn=loss_fn, cluster="cpu-gloo", cache=False,
                                 pipeline=Pipeline(count, **options))
    got, want = compiled(*batch), loss_fn(whole(*batch[:-1]), batch[-1])
    got.backward()
    want.backward()
    return compiled, whole, got, want


def assert_same(model: nn.Module, batch: tuple, loss_fn: Callable, count: int, **options: object) -> None:
    compiled, whole, got, want = both(model, batch, loss_fn, count, **options)
    assert torch.allclose(got, want, rtol=1e-12, atol=0)
    for (name, p), q in zip(whole.named_parameters(), compiled.parameters(), strict=True):
        assert (p.grad - q.grad).norm() <= 1e-12 * max(p.grad.norm(), 1e-3), name


def features(rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def classes(rows: int = ROWS) -> torch.Tensor:
    return torch.randint(5, (rows,), generator=torch.Generator().manual_seed(2))
