"""Tensors of size 0 between processes: what carries collectives takes them, and models that have them train."""
from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autoshard.collectives import RUN
from autoshard.runtime.carriers import gloo_messages, over_shared_memory
from autoshard.runtime.carriers.shared_memory import share_memory
from autoshard.runtime.module import CompiledModule
from autoshard.runtime.ranks.place import locate
from tests.dist.harness import on_ranks, whole
from tests.dist.planners import by_planner, random_planner

pytestmark = pytest.mark.dist


class Frozen(nn.Module):
    """An empty parameter, an empty slice, and a batch norm with given statistics, whose op makes an empty output."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv1d(8, 16, 3, padding=1), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16)
        self.norm.eval()
        self.none = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.one(x)).relu().transpose(1, 2)
        return torch.cat([self.two(h[:, :0]), self.two(h)], 1) + self.none.sum()


def carried() -> int:
    """Calls with nothing to send, between others that have something."""
    group, n, count = dist.group.WORLD, dist.get_world_size(), 0
    memory = share_memory(group, 30.0)
    for by, carrier in ((gloo_messages, gloo_messages.Members(group)), (over_shared_memory, memory))[:2 if memory else 1]:
        for shape in ((0, 3), (2 * n, 0), (0,)):
            x, one = torch.zeros(shape), torch.ones(n)
            calls = [("all_gather", x, (n * shape[0], *shape[1:])), ("all_gather", one, (n * n,)), ("all_to_all", x, shape),
                     ("reduce_scatter", x, (shape[0] // n, *shape[1:])), ("all_reduce", x, shape)]
            pending = [(by.exchange(RUN[kind], sent, "sum", carrier, in_place=True), want) for kind, sent, want in calls]
            for flight, want in pending:
                assert tuple(gloo_messages.land(flight).shape) == want, (by, shape)
                count += 1
    return count


def trained() -> list[float]:
    torch.manual_seed(0)
    model, x = Frozen().double(), torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(1)).double()
    found = []
    for seed in (0, 1, 2):
        alone, sharded = copy.deepcopy(model), CompiledModule(copy.deepcopy(model), locate("d=2"), by_planner(random_planner(seed, "replicate")))
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (alone, sharded)]
        for _ in range(2):
            for net, optimizer in zip((alone, sharded), optimizers, strict=True):
                loss = net(x).square().sum()
                loss.backward()
                found.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
        for (name, a), (_, b) in zip(alone.named_parameters(), sharded.named_parameters(), strict=True):
            assert torch.allclose(a, whole(b)), name
    assert all(abs(a - b) < 1e-9 * abs(a) for a, b in zip(found[::2], found[1::2], strict=True))
    return found


def both() -> tuple[int, list[float]]:
    return carried(), trained()


def test_nothing_between_processes() -> None:
    (calls, losses), other = on_ranks(2, both)
    assert calls >= 15 and len(losses) == 12 and (calls, losses) == other
