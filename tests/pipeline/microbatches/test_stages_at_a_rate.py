"""Stages planned at a price per byte: taken where they fit together, else planned within the limit."""

import pytest
import torch
from torch import nn

from autoshard import Pipeline
from autoshard.base.mesh import parse_mesh
from autoshard.decide.options import Options
from autoshard.errors import InfeasibleError
from autoshard.pipeline import plan_stages
from autoshard.pipeline.microbatches.batch import traced
from autoshard.planner import stage_planner
from autoshard.planner.stages import plan_traced

MESH = parse_mesh("pp=2,dp=2")


@pytest.fixture(scope="module")
def asked():
    """A model in two stages, and options with a budget in which its fast plan does not fit."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(4)))
    inputs, pipeline = (torch.randn(4096, 8), torch.randn(4096, 8)), Pipeline(microbatches=4, schedule="1f1b", cuts=("2",))
    program = traced(model, inputs, {}, pipeline, loss_fn=nn.functional.mse_loss, training=True)
    ample = plan_traced(program, MESH, Options(cluster="cpu-gloo", pipeline=pipeline))
    options = Options(cluster="cpu-gloo", pipeline=pipeline, memory_budget=0.7 * max(s.memory["total"] for s in ample.stages))
    return program, options, ample


def test_stages_that_fit_are_not_searched_again(asked, monkeypatch):
    program, options, ample = asked
    monkeypatch.setattr(stage_planner, "searched", lambda *a, **k: pytest.fail("a search within a limit"))
    made = plan_traced(program, MESH, options, rates=(ample.objective_s / ample.stages[0].memory["total"],))
    assert all(s.memory["total"] <= options.memory_budget for s in made.stages)
    assert made.recompute and not ample.recompute
    assert ample.bound_s * (1 - 1e-9) <= made.objective_s and 0.0 <= made.bound_s <= made.objective_s


def test_where_the_rate_is_too_low_the_limit_decides(asked):
    program, options, ample = asked
    by_limit = plan_traced(program, MESH, options)
    made = plan_traced(program, MESH, options, rates=(1e-6 * ample.objective_s / ample.stages[0].memory["total"],))
    assert made.objective_s == by_limit.objective_s and made.recompute == by_limit.recompute
    assert all(s.memory["total"] <= options.memory_budget for s in made.stages)


def test_stages_that_do_not_fit_into_their_shares_are_planned_at_a_rate(monkeypatch):
    """A rank's stages ask for more or less by what their memory is worth; shares of it are by what they take in ample memory."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(4)))
    inputs, pipeline = (torch.randn(4096, 8), torch.randn(4096, 8)), Pipeline(microbatches=4, schedule="zb1p", chunks=2, cuts=("1", "2", "3"))
    program = traced(model, inputs, {}, pipeline, loss_fn=nn.functional.mse_loss, training=True)
    ample = plan_traced(program, MESH, Options(cluster="cpu-gloo", pipeline=pipeline))
    options = Options(cluster="cpu-gloo", pipeline=pipeline, memory_budget=0.8 * max(s.memory["total"] for s in ample.stages))
    made = plan_traced(program, MESH, options)
    assert all(s.memory["total"] <= options.memory_budget for s in made.stages) and made.recompute
    monkeypatch.setattr(plan_stages, "LEANER", ())
    with pytest.raises(InfeasibleError, match="on its rank with stage|shares its rank's memory with stage"):
        plan_traced(program, MESH, options)
