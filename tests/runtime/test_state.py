"""State on one process: the numbers of the model, in the memory it has."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import autoshard
from tests.support.decoding import Decoder

CALLS = [(torch.arange(3), 3), *((torch.tensor([p]), 1) for p in range(3, 8))]


def tokens(new: int, seed: int) -> torch.Tensor:
    return torch.randint(251, (4, new), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize("write", ["index_copy", "index_put", "scatter"])
def test_a_cache_stays_where_it_is(write):
    alone = Decoder(batch=4, length=12, layers=1, write=write).double()
    model = autoshard.compile(copy.deepcopy(alone), "d=1", cluster="cpu-gloo", cache=False)
    places = None
    for seed, (position, new) in enumerate(CALLS):
        torch.testing.assert_close(model(tokens(new, seed), position), alone(tokens(new, seed), position), rtol=1e-9, atol=1e-12)
        now = [b.data_ptr() for b in model.buffers()]
        assert places in (None, now)
        places = now
    for name, b in alone.named_buffers():
        assert torch.equal(model.get_buffer(name), b)


class Recurrent(nn.Module):
    """A state that is computed anew, one that is added to, and one whose old rows are read after they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        for name in ("hidden", "total", "last"):
            self.register_buffer(name, torch.zeros(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = torch.tanh(self.linear(self.hidden) + x)
        self.total.mul_(0.5).add_(self.hidden)
        before = self.last.clone()
        self.last[1:3] = x[1:3]
        return self.hidden + self.total + torch.sin(before * self.last)


@torch.no_grad()
def test_any_state_is_carried():
    alone = Recurrent().double()
    model = autoshard.compile(copy.deepcopy(alone), "d=1", cluster="cpu-gloo", cache=False)
    results = []
    for seed in range(4):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        results.append((model(x), alone(x)))
    for got, want in results:  # none was written over by a later call
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_any_state_is_carried_split_over_ranks():
    for spec in ("tp,-", "-,tp"):
        report = autoshard.verify(Recurrent().double(), "tp=2", (torch.randn(4, 6).double(),), training=False, cluster="cpu-gloo",
                                  seeds=dict.fromkeys(("hidden", "total", "last"), spec))
        assert report.ok, str(report)


class HandsOn(nn.Module):
    """What one state was is another's new value, and a result."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear = way, nn.Linear(6, 6)
        self.register_buffer("now", torch.zeros(4, 6))
        self.register_buffer("last", torch.ones(4, 6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h, before = self.linear(x), self.now
        if self.way == "shifted":
            self.last, self.now = self.now, h
        elif self.way == "swapped":
            self.last, self.now = self.now, self.last + h
        else:
            self.now = h
        return h * self.last, before, before[1:], self.last


@torch.no_grad()
@pytest.mark.parametrize("way", ["shifted", "swapped", "returned"])
def test_a_state_that_is_handed_on_is_read_before_it_is_written(way):
    torch.manual_seed(0)
    alone = HandsOn(way).double()
    model, given = autoshard.compile(copy.deepcopy(alone), "d=1", cluster="cpu-gloo", cache=False), []
    for _ in range(3):
        x = torch.randn(4, 6, dtype=torch.float64)
        given += zip(model(x), alone(x), strict=True)
        for name, b in alone.named_buffers():
            torch.testing.assert_close(model.get_buffer(name), b, rtol=1e-12, atol=1e-12)
    for mine, theirs in given:  # also those of calls before
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
