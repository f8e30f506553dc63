"""Parameters whose gradients are equal, or parts of each other: a program computes them once, and what a loop writes into one must not reach another.
Two ranks against one process, in one start."""
from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import autoshard
from autoshard.runtime.module import CompiledModule
from autoshard.runtime.ranks.place import locate
from tests.dist.harness import assert_near, on_ranks, same_gradients
from tests.dist.planners import by_planner, random_planner

pytestmark = pytest.mark.dist
EXACT = 1e-9


class Branches(nn.Module):
    """Two layers on one input, added."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(x)


class Cell(nn.Module):
    """Two biases that are added to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x)[0]


class Parts(nn.Module):
    """A parameter that is added to all rows, one with another shape, and one that is added to some: its gradient is a part of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Parameter(torch.zeros(8, 4)), nn.Parameter(torch.zeros(6, 4)), nn.Parameter(torch.zeros(1, 8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.a + self.c[0]
        return torch.cat([h[:2], h[2:] + self.b])


def clipped(m: nn.Module) -> None:
    nn.utils.clip_grad_norm_(m.parameters(), 0.01)


def halved(m: nn.Module) -> None:
    for p in m.parameters():
        p.grad.mul_(0.5)


WAYS: tuple[Callable[[nn.Module], None], ...] = (clipped, halved, lambda m: None)
"""What loops do with gradients; the last one leaves them, and the next steps add theirs."""


def pair_of(kind: type[nn.Module], n: int) -> tuple[CompiledModule, nn.Module]:
    torch.manual_seed(0)
    model = kind().double()
    return CompiledModule(model, locate("d=2"), by_planner(random_planner(n))), copy.deepcopy(model)


def steps(kind: type[nn.Module], n: int) -> None:
    pair, x = pair_of(kind, n), torch.randn(3, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for way in WAYS:
        for i in range(3):
            for m in pair:
                m(x[i]).square().mean().backward()
                way(m)
            same_gradients(*pair, EXACT)
            if way is not WAYS[-1]:
                for m in pair:
                    m.zero_grad()
    for m in pair:
        m.zero_grad()
        for i in range(2):
            with m.no_sync() if m is pair[0] and not i else torch.enable_grad():
                m(x[i]).square().mean().backward()
        clipped(m)
    same_gradients(*pair, EXACT)


def tangents() -> None:
    """A gradient that is what arrives at the result."""
    x = torch.zeros(8, 4, dtype=torch.float64)
    for m in pair_of(Parts, 0):
        arriving, y = torch.ones_like(x), m(x)
        y.backward(arriving)
        halved(m)
        assert_near("what arrived", arriving, torch.ones_like(x), 0.0)


def batches_in_parts(mesh: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Branches(), nn.Tanh(), nn.Linear(6, 6)).double()
    batch = (torch.randn(8, 4).double(), torch.randn(8, 6).double())
    compiled = autoshard.compile(copy.deepcopy(model), mesh, batch, loss_fn=F.mse_loss, cluster="cpu-gloo", cache=False,
                                 pipeline=autoshard.Pipeline(microbatches=2))
    for _ in range(2):
        (2.0 * compiled(*batch)).backward()
        (2.0 * F.mse_loss(model(batch[0]), batch[1])).backward()
        for m in (compiled, model):
            halved(m)
    for name, p in compiled.named_parameters():
        assert_near(f"{mesh}: gradient of {name}", p.grad, model.get_parameter(name).grad, EXACT)


def all_cases() -> None:
    for kind in (Branches, Cell, Parts):
        for n in range(3):
            steps(kind, n)
    tangents()
    for mesh in ("d=2", "pp=2"):
        batches_in_parts(mesh)
    assert dist.get_world_size() == 2


def test_gradients_have_memory_of_their_own() -> None:
    on_ranks(2, all_cases)
