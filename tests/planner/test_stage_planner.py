"""Stages that are alike are searched once, and their plans are those that searches of their own make."""
from dataclasses import replace

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Pipeline
from autoshard.base.mesh import parse_mesh
from autoshard.base.plan import Plan
from autoshard.decide.options import Options
from autoshard.pipeline.microbatches.batch import traced
from autoshard.planner import stage_planner
from autoshard.planner.stage_planner import StagePlanner
from autoshard.planner.stages import plan_traced
from models import llama

MESHES = {"1f1b": "pp=4,dp=2", "zb1p": "pp=4,dp=2", "interleaved": "pp=2,dp=2"}
SCHEDULES = pytest.mark.parametrize("schedule", MESHES)


def asked(schedule):
    """A model of six equal blocks and a last one, in four stages; the mesh and the options."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(6)]
    pipeline = Pipeline(microbatches=4, schedule=schedule, chunks=2 if schedule == "interleaved" else 1, cuts=("1", "3", "5"))
    program = traced(nn.Sequential(*blocks, nn.Linear(8, 4)), (torch.randn(4096, 8), torch.randn(4096, 4)), {}, pipeline,
                     loss_fn=nn.functional.mse_loss, training=True)
    return program, parse_mesh(MESHES[schedule]), Options(cluster="cpu-gloo", pipeline=pipeline)


@pytest.fixture
def searches(monkeypatch):
    """Which searches were asked for stages, counted."""
    made = []
    for name in ("searched", "searched_at_rate"):
        ask = getattr(stage_planner, name)
        monkeypatch.setattr(stage_planner, name, lambda *args, ask=ask, name=name, **how: made.append(name) or ask(*args, **how))
    return made


def apart(monkeypatch, *args, **how):
    """The plan of which every stage is searched."""
    with monkeypatch.context() as patch:
        patch.setattr(StagePlanner, "_alike", lambda *args: None)
        return plan_traced(*args, **how)


def plain(plan):
    """The plan without what only says how it was searched."""
    return replace(plan, search={}, timings={}).to_json()


@SCHEDULES
def test_plans_are_those_of_searches_apart(schedule, searches, monkeypatch):
    given = asked(schedule)
    plan = plan_traced(*given)
    assert len(searches) == 3  # the first stage, one of two alike, and the last
    assert plain(plan) == plain(apart(monkeypatch, *given))


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p"])
def test_where_memory_is_short_they_cost_what_searches_apart_find(schedule, monkeypatch):
    program, mesh, options = asked(schedule)
    ample = plan_traced(program, mesh, options)
    options = replace(options, memory_budget=0.7 * max(s.memory["total"] for s in ample.stages))
    plan, other = plan_traced(program, mesh, options), apart(monkeypatch, program, mesh, options)
    assert plan.ops != ample.ops
    assert (plan.objective_s, plan.bound_s) == pytest.approx((other.objective_s, other.bound_s), rel=1e-9)
    assert all(s.memory["total"] <= options.memory_budget for s in plan.stages)


@SCHEDULES
def test_at_a_rate_all_that_are_alike_are_one_search(schedule, searches, monkeypatch):
    program, mesh, options = asked(schedule)
    ample = plan_traced(program, mesh, options)
    rate = ample.objective_s / ample.stages[0].memory["total"]
    searches.clear()
    plan = plan_traced(program, mesh, options, rates=(rate,))
    assert searches == 3 * ["searched_at_rate"]
    assert plain(plan) == plain(apart(monkeypatch, program, mesh, options, rates=(rate,)))


def test_seeds_for_one_of_them_make_stages_unlike(searches):
    program, mesh, options = asked("1f1b")
    plan = plan_traced(program, mesh, replace(options, seeds={"3.0.weight": "dp,-"}))
    assert len(searches) == 4
    assert plan.placements["3.0.weight"] == (0,)


def test_a_plan_of_stages_that_are_alike_computes_what_the_model_does(searches):
    torch.manual_seed(0)
    model = llama.Llama(llama.Config(4, 16, 2, 2, 32, vocab=32, context=8)).double()
    batch = torch.randint(32, (8, 8)), torch.randint(32, (8, 8))
    given = {"loss_fn": llama.loss, "cluster": "cpu-gloo"}
    plan = autoshard.plan(model, "pp=4,dp=2", batch, pipeline=Pipeline(4, "1f1b", ["layers.1", "layers.2", "layers.3"]), **given)
    assert len(searches) == 3
    assert autoshard.verify(model, "pp=4,dp=2", batch, plan=Plan.from_json(plan.to_json()), **given).ok
