"""Weights of which the gradient has other logical dims, as it has where the activation beside it was reshaped: a weight of 9 x 24, a gradient of
(3 x 3) x 24. They lie alike by dims of tensors, in searched and seeded plans, baselines, propagation and on real processes."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from tests.dist.harness import assert_same_training, on_ranks, twins

SLOW = str(Path(__file__).parents[1] / "slow-device.toml")


class Table(nn.Module):
    """`normed`: the weight is that of an RMS norm over everything."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.weight, self.normed = nn.Parameter(torch.rand(9, 24) + 0.5), normed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x.reshape(3, 3, 24)).reshape(9, 24)
        return (F.rms_norm(x, (9, 24), self.weight) if self.normed else x * self.weight).square().mean()


class Vector(nn.Module):
    """20 features of 2 x 5 x 2: on four ranks the gradient cannot be split as the weight could."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(20) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(x.reshape(20, 4)).permute(1, 0)
        return F.rms_norm(x, (20,), self.weight).sin().mean()


def table(normed: bool) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Table(normed), (torch.randn(3, 3, 6, 4),)


@pytest.mark.parametrize("how", [{}, {"search": "propagate"}], ids=["searched", "propagated"])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("seed", ["-,d", "d,-"])
def test_a_seeded_weight_is_trained(seed, normed, how):
    model, batch = table(normed)
    plan = autoshard.plan(model, "d=3", batch, cluster=SLOW, seeds={"weight": seed}, **how)
    assert plan.placements["weight"] != (-1,)
    report = autoshard.verify(model, "d=3", batch, plan=plan, optimizer="adamw", steps=2)
    assert report.ok, str(report)


@pytest.mark.parametrize("build, mesh", [(lambda: table(True), "d=3"), (lambda: table(False), "d=3"),
                                         (lambda: (Vector(), (torch.randn(2, 5, 2, 4),)), "d=4"), (lambda: (Vector(), (torch.randn(2, 5, 2, 4),)), "d=2")])
def test_plans_of_every_kind(build, mesh):
    torch.manual_seed(0)
    model, batch = build()
    report = autoshard.verify(model, mesh, batch, plans=("split", "fully_sharded", "tensor_parallel", "random:1", "random:2", "random:3"), steps=2)
    assert report.ok, str(report)


def trained() -> None:
    for normed in (True, False):
        model, reference, batch = twins(lambda normed=normed: table(normed), torch.float64)
        compiled = autoshard.compile(model, "d=3", cluster=SLOW, seeds={"weight": "-,d"}, cache=False)
        assert_same_training(compiled, reference, [batch] * 3, lambda m, b: m(*b))
        assert compiled.weight.to_local().shape == (9, 8)


@pytest.mark.dist
def test_real_processes() -> None:
    on_ranks(3, trained)
