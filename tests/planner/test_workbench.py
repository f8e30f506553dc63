"""Second plans of a model: equal to first ones, and made of what the first one left."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import models.gpt
import models.mlp
from autoshard.base.mesh import parse_mesh
from autoshard.base.plan import Plan
from autoshard.cost.change import changed
from autoshard.cost.cluster import load_cluster
from autoshard.decide.options import Options
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.pipeline.microbatches.batch import Batch
from autoshard.planner import workbench
from autoshard.planner.open_mesh import plan_batch
from autoshard.planner.workbench import Workbench

MESH, OPTIONS, H100 = parse_mesh("dp=4"), Options(time_limit=30.0), load_cluster("h100-dgx")
HALF = changed(H100, "links.nvlink.bandwidth", lambda number: 0.5 * number)


def bench(name: str = "mlp", batch: int = 512) -> Workbench:
    module = {"mlp": models.mlp, "gpt": models.gpt}[name]
    with torch.device("meta"):
        model, inputs = module.build("tiny", batch=batch)
    return Workbench(Batch(model, inputs, {}, OPTIONS.tracing(module.loss, True)), True)


def phases(on: Workbench, mesh=MESH, options=OPTIONS, profile=H100) -> tuple[Plan, set[str]]:
    clock = PhaseTimer()
    return on.plan(mesh, options, profile=profile, clock=clock), set(clock.seconds)


def anew(options=OPTIONS, mesh=MESH) -> Plan:
    """The plan of a first call."""
    return plan_batch(bench().batch, mesh, options, clock=PhaseTimer(), has_loss=True)


def test_another_budget_that_is_ample_needs_no_search(monkeypatch):
    on = bench()
    first, met = phases(on)
    assert {"trace", "strategies", "costs", "formulate", "search"} <= met
    monkeypatch.setattr("autoshard.decide.how.solve", lambda *a, **k: pytest.fail("nothing is to be searched"))
    second, met = phases(on, options=replace(OPTIONS, memory_budget=2 * first.memory["total"]))
    assert met == {"formulate", "search", "assemble"}
    assert second == replace(first, stages=second.stages) and second.memory["limit"] == 2 * first.memory["total"]


@pytest.mark.parametrize("change", [{"optimizer": "sgd"}, {"seeds": {"input:0": "dp,-"}}])
def test_a_second_plan_is_that_of_a_first_call(change):
    asked, on = replace(OPTIONS, **change), bench()
    on.plan(MESH, OPTIONS)
    assert on.plan(MESH, asked).objective_s == anew(asked).objective_s


def test_within_less_memory_a_second_plan_is_as_good_as_a_first_one():
    on, fresh, ample = bench("gpt", 64), bench("gpt", 64), replace(OPTIONS, cluster="cpu-gloo")
    tight = replace(ample, memory_budget=0.8 * on.plan(MESH, ample).memory["total"])
    second, first = on.plan(MESH, tight), fresh.plan(MESH, tight)
    assert second.objective_s <= first.objective_s * (1 + 1e-9) and second.bound_s <= first.objective_s
    assert second.memory["total"] <= tight.memory_budget
    assert second.worth.ample_s == pytest.approx(first.worth.ample_s) and second.worth.binds(second.objective_s)


def test_a_second_mesh_is_as_good_as_a_first_one():
    on, other = bench(), parse_mesh("dp=2,tp=2")
    on.plan(MESH, OPTIONS)
    second, met = phases(on, other)
    assert second.objective_s == pytest.approx(anew(mesh=other).objective_s, rel=1e-9) and "strategies" in met


def test_another_profile_keeps_trace_and_strategies_and_gives_its_own_plan():
    on = bench()
    first = on.plan(MESH, OPTIONS)
    slow, met = phases(on, profile=HALF)
    assert not met & {"trace", "strategies"} and "costs" in met
    fresh = bench().plan(MESH, OPTIONS, profile=HALF)
    assert slow.objective_s == pytest.approx(fresh.objective_s, rel=1e-9)
    back, met = phases(on)
    assert back.objective_s == first.objective_s and "costs" not in met, "the first program is still there"


def test_starting_plans_of_another_profile_are_plans_here():
    on = bench("gpt", 64)
    like = on.program(MESH, OPTIONS, H100, PhaseTimer())
    table = replace(like.formulation.table)
    same = workbench.program_like(like, table, 1e18)
    assert len(same.starts) >= len(like.starts)
    assert all(any(np.array_equal(a, b) for b in same.starts) for a in like.starts)


def test_a_profile_without_overlap_groups_ops_as_a_first_plan_does():
    """On one axis views decide with their contraction only where nothing overlaps."""
    on, still = bench("gpt", 64), changed(H100, "overlap.eta", lambda number: 0.0)
    asked = (on, H100), (on, still), (bench("gpt", 64), still)
    before, after, fresh = ({u.members for u in b.program(MESH, OPTIONS, profile, PhaseTimer()).formulation.units.units} for b, profile in asked)
    assert after == fresh != before


def test_few_programs_are_kept(monkeypatch):
    monkeypatch.setattr(workbench, "MOST_PROGRAMS", 2)
    on = bench()
    for text in ("a=2", "a=4", "a=8"):
        on.program(parse_mesh(text), OPTIONS, H100, PhaseTimer())
    assert [key.split()[0] for key in on._programs] == ["a=4", "a=8"]
