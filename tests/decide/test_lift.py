"""Plans of a coarser mesh on finer ones: the same step, or a shorter one."""
from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
import torch

from autoshard.base.mesh import parse_mesh
from autoshard.base.plan import Plan
from autoshard.decide.backends import find
from autoshard.decide.options import Options
from autoshard.decide.program import formulate_within
from autoshard.decide.walks.lift import lifted, parts_of
from autoshard.pipeline.microbatches.batch import Batch
from autoshard.planner.one_stage import decide, prices
from autoshard.program.calling import Traced
from autoshard.search.problem import evaluate

AMPLE = 1e15


@pytest.mark.parametrize("coarse, fine, parts", [
    ("8x8", "8x2x4", (0, 1, 1)), ("16x4", "8x2x4", (0, 0, 1)), ("64", "8x2x4", (0, 0, 0)), ("1x64", "8x8", (1, 1)), ("8x8", "8x8", (0, 1)),
    ("8x8", "4x4x4", None), ("8x8", "16x4", None), ("8x8", "8x4", None), ("8x4", "8x8", None),
])
def test_axes_are_parts_of_axes(coarse, fine, parts):
    assert parts_of(parse_mesh(coarse), parse_mesh(fine)) == parts


def traced(name: str, **sizes: int) -> Traced:
    module = import_module(f"models.{name}")
    with torch.device("meta"):
        model, inputs = module.build("tiny", batch=16, **sizes)
    return Batch(model, inputs, {}, {"loss_fn": module.loss, "training": True}).whole


def coarse_plan(program: Traced, mesh: str, options: Options) -> Plan:
    """Over decision units: refined op by op it is none of them."""
    return decide(prices(program, parse_mesh(mesh), options), options, finer=False)


@pytest.mark.parametrize("cluster", ["h100-dgx", "cpu-gloo"])
@pytest.mark.parametrize("name, coarse, fine", [
    ("mlp", "4x4", "4x2x2"), ("mlp", "16", "2x8"), ("gpt", "4x4", "2x2x4"), ("llama", "2x4", "2x2x2"), ("llama", "16", "4x4"), ("vit", "8", "4x2"),
])
def test_a_lifted_plan_costs_what_it_did_or_less(name, coarse, fine, cluster):
    options, program = Options(cluster=cluster), traced(name)
    plan = coarse_plan(program, coarse, options)
    finer = formulate_within(prices(program, parse_mesh(fine), options), AMPLE)
    choice = lifted(finer, plan)
    assert choice is not None
    assert evaluate(finer.problem, choice) <= plan.objective_s * (1 + 1e-9)
    placed = finer.strategy_of(choice)
    parts = parts_of(plan.mesh, finer.table.mesh)
    for name, strategy in placed.items():
        there = finer.table.strategies[name].strategy(strategy)
        assert there == tuple(tuple(tuple(s[a] for a in parts) for s in specs) for specs in (plan.ops[name].inputs, plan.ops[name].outputs))


def test_a_plan_of_another_program_is_not_lifted():
    options = Options(cluster="cpu-gloo")
    plan = coarse_plan(traced("mlp"), "4", options)
    other = formulate_within(prices(traced("gpt"), parse_mesh("2x2"), options), AMPLE)
    assert lifted(other, plan) is None


def test_a_search_starts_from_coarser_plans_of_its_program(monkeypatch):
    options, program, seen = Options(cluster="cpu-gloo", time_limit=20.0), traced("gpt"), []
    plans = [coarse_plan(program, "4x4", options), coarse_plan(traced("mlp"), "4x4", options)]
    monkeypatch.setattr("autoshard.decide.program.starting_plans", lambda formulation: ())
    monkeypatch.setattr("autoshard.planner.one_stage.find", lambda asked, how: seen.append(asked) or find(asked, how))
    fine = decide(prices(program, parse_mesh("4x2x2"), options), options, finer=False, coarser=plans)
    asked, start = seen[-1], lifted(seen[-1].formulation, plans[0])  # strategies near layouts close to the bound were searched before
    assert any(np.array_equal(start, known) for known in asked.starts) and lifted(asked.formulation, plans[1]) is None
    assert evaluate(asked.formulation.problem, start) <= plans[0].objective_s * (1 + 1e-9)
    assert fine.objective_s <= plans[0].objective_s * (1 + 1e-9)
