"""Options given beside `plan=`: what contradicts the plan is refused, since the plan runs as it is."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import autoshard
from autoshard.base.mesh import parse_mesh
from autoshard.base.plan import Plan
from autoshard.decide.options import Options
from autoshard.errors import PlanError, SeedError
from autoshard.pipeline.microbatches.batch import Batch
from autoshard.program.calling import Traced
from autoshard.runtime.check_plan import check_asked

MESH = parse_mesh("tp=2")
X = torch.randn(4, 8)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def given() -> tuple[Plan, Traced]:
    plan = autoshard.plan(model(), MESH, (X,), seeds={"0.weight": "tp,-"}, cluster="cpu-gloo")
    return plan, Batch(model(), (X,), {}, {"training": True}).on(MESH, Options().pipeline)


def test_seeds_that_the_plan_meets_are_taken():
    plan, traced = given()
    for seeds in ({}, {"0.weight": "tp,-"}, {"0.weight": "tp,?", "input:0": "-,-"}, {"0.bias": "..."}):
        check_asked(plan, traced.graph, Options(seeds=seeds))


@pytest.mark.parametrize("seeds, error, message", [
    ({"0.weight": "-,tp"}, PlanError, r"has S0 where seed '0.weight' = '-,tp' is given with it"),
    ({"output:0": "tp,-"}, PlanError, r"has R where seed 'output:0' = 'tp,-'"),
    ({"0.wieght": "tp,-"}, SeedError, "matches nothing.*0.weight")])
def test_seeds_that_it_does_not_meet_are_refused(seeds, error, message):
    plan, traced = given()
    with pytest.raises(error, match=message):
        check_asked(plan, traced.graph, Options(seeds=seeds))


def test_a_smaller_budget_is_refused():
    plan = autoshard.plan(model(), "d=1", (X,), cluster="cpu-gloo")
    with pytest.raises(PlanError, match="needs .* on a rank, and memory_budget is 1.00 KiB"):
        autoshard.compile(model(), "d=1", (X,), plan=plan, memory_budget="1KiB", cache=False)
    fast = autoshard.compile(model(), "d=1", (X,), plan=plan, memory_budget=plan.stages[0].total, cache=False)
    assert fast(X).shape == (4, 4)


def test_of_stages_the_fullest_counts():
    plan, traced = given()
    stage = plan.stages[0]
    with pytest.raises(PlanError, match="memory_budget"):
        check_asked(replace(plan, stages=(stage, replace(stage, memory={"total": 1e9}))), traced.graph, Options(memory_budget=1e8))
