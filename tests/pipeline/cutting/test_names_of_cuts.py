"""Cuts that are searched have names that say where they are, whatever the modules are called and however often they run."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard import Pipeline
from autoshard.base.mesh import parse_mesh
from autoshard.cost.cluster import load_cluster
from autoshard.errors import UsageError
from autoshard.pipeline.cutting.blocks import Blocks
from autoshard.pipeline.cutting.cut_points import even_cuts, named, names_of
from autoshard.pipeline.microbatches.batch import traced
from autoshard.pipeline.pipelined import pipelined

OPTIONS = Pipeline(microbatches=2, schedule="1f1b")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.up, self.behind, self.down = nn.RMSNorm(16), nn.Linear(16, 32), nn.RMSNorm(32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.behind(self.up(self.before(x))))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class OneNorm(Layers):
    """All layers have one norm in their middle, so every layer's own ops are in pieces."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.behind = self.layers[0].behind


class Repeated(Layers):
    """One layer runs twice, with another between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.layers = nn.Linear(16, 16), nn.Linear(16, 16), nn.ModuleList([Layer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.between(super().forward(self.first(x))))


class OwnOps(Layers):
    """A module computes something itself behind its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.rand(16, 96)), nn.Parameter(torch.rand(96, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x) @ self.up) @ self.down


class Inside(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.last = inner, nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(x))


MODELS = {"one norm": OneNorm, "a layer again": Repeated, "ops behind layers": OwnOps}


def subject(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return Inside(MODELS[name]()).double(), (torch.randn(8, 16, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64))


@pytest.mark.parametrize("name", MODELS)
def test_a_name_is_read_as_its_block(name):
    model, batch = subject(name)
    graph = traced(model, batch, {}, OPTIONS, loss_fn=F.mse_loss).graph
    blocks = Blocks.of(graph)
    for at in range(1, len(blocks.blocks)):
        cuts = names_of(blocks, [at])
        assert named(blocks, cuts, 2) == (at,)
        assert pipelined(graph, parse_mesh("pp=2"), replace(OPTIONS, cuts=cuts)).cut.names == cuts
    assert len(named(blocks, even_cuts(graph, load_cluster("cpu-gloo"), 3), 3)) == 2


@pytest.mark.parametrize("name", MODELS)
def test_searched_cuts_are_planned_and_are_right(name):
    model, batch = subject(name)
    plan = autoshard.plan(model, "pp=3", batch, loss_fn=F.mse_loss, cluster="cpu-gloo", pipeline=OPTIONS)
    again = Pipeline.from_data(plan.pipeline["options"])
    assert len(again.cuts) == 2
    report = autoshard.verify(model, "pp=3", batch, loss_fn=F.mse_loss, pipeline=again, plans=("searched", "split"))
    assert report.ok, str(report)


def test_an_error_says_how_to_cut_where_a_module_runs_first():
    model, batch = subject("a layer again")
    with pytest.raises(UsageError, match="'inner.layers.0': the module runs 2 times.*'block inner.layers.0'"):
        autoshard.plan(model, "pp=2", batch, loss_fn=F.mse_loss, cluster="cpu-gloo", pipeline=replace(OPTIONS, cuts=("inner.layers.0",)))
