"""Weights whose axes nest out of mesh order against the model on one device: all ranks in this process, and what such plans cost."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoshard
from autoshard import Pipeline, Precision
from autoshard.base.spec import is_inner, parse_spec
from autoshard.errors import PlanError
from autoshard.program.trace import trace
from autoshard.runtime.check_plan import check_fits

SEEDS = {"up.weight": "tp*dp,-", "up.bias": "tp*dp", "input:0": "dp,-", "up": "dp,tp"}
"""Columns over tp, the batch over dp."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.norm(self.up(x))))


def batch(rows: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(rows, 16, generator=g), torch.randint(8, (rows,), generator=g)


def planned(seeds: dict, **options) -> autoshard.Plan:
    return autoshard.plan(Net(), "dp=2,tp=4", batch(), loss_fn=F.cross_entropy, cluster="cpu-gloo", seeds=seeds, **options)


@pytest.mark.parametrize("mesh, options", [("dp=2,tp=2", {}), ("dp=2,tp=2", {"precision": Precision("bf16")}), ("dp=2,tp=2", {"pipeline": Pipeline(3)}),
                                           ("dp=2,tp=2", {"pipeline": Pipeline(3), "precision": Precision("bf16")}), ("a=2,dp=2,tp=2", {})])
def test_numbers_are_those_of_one_device(mesh, options):
    seeds = SEEDS if mesh == "dp=2,tp=2" else {"up.weight": "tp*a*dp,-", "down.weight": "-,dp*tp*a", "up.bias": "a*tp*dp"}
    torch.manual_seed(0)
    report = autoshard.verify(Net(), mesh, batch(), loss_fn=F.cross_entropy, plans=("fully_sharded", "random:1", "random:2"), steps=2, seeds=seeds, **options)
    assert report.ok, [p.first_wrong for p in report.plans]
    for found in report.plans:
        assert any(is_inner(p) for p in found.plan.placements["up.weight"])


def test_dp_is_gathered_alone():
    """One gather and one reduction over dp, of tp's piece; in mesh order tp's ranks exchange the weight too, and pay for it."""
    inner, order = (planned({**SEEDS, "up.weight": text}) for text in ("tp*dp,-", "dp*tp,-"))
    moved = [{(c.kind, c.axis) for c in p.collectives if c.hideable and c.module == "up" and c.nbytes >= 16 * 8 * 4} for p in (inner, order)]
    assert moved[0] == {("all_gather", "dp"), ("reduce_scatter", "dp")}
    assert any("tp" in axis for _, axis in moved[1])
    assert inner.objective_s < order.objective_s


def test_the_search_chooses_the_nesting():
    """Where a dim is all there is to split, as that of a bias, and where it is given: no dearer than any nesting that a seed asks for."""
    base = {name: text for name, text in SEEDS.items() if name != "up.weight"}
    free = planned(base)
    assert free.status.startswith("optimal")
    assert all(free.objective_s <= planned({**base, "up.weight": text}).objective_s * (1 + 1e-9) for text in ("tp*dp,-", "dp*tp,-", "tp,dp", "tp,-"))


@pytest.mark.parametrize("text", ["I0,R", "I0,S0"])
def test_what_computes_has_no_inner_shards(text):
    """A file that says so is refused: the op would compute with other rows than it thinks, and so is an inner shard of nothing."""
    traced = trace(Net(), (batch()[0],), {}, loss_fn=None)
    plan = autoshard.plan(Net(), "dp=2,tp=2", (batch()[0],), cluster="cpu-gloo")
    check_fits(plan, traced.graph, plan.mesh)
    name = next(op.name for op in traced.graph.of_kind("param" if text == "I0,R" else "call") if op.outputs[0].shape == ((32,) if "R" in text else (24, 32)))
    chosen = replace(plan.ops[name], outputs=(parse_spec(text), *plan.ops[name].outputs[1:]))
    with pytest.raises(PlanError, match="inner shards are inside of another axis"):
        check_fits(replace(plan, ops={**plan.ops, name: chosen}), traced.graph, plan.mesh)
