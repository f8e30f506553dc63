"""Plans with stages, simulated: the objective where nothing hides, what perturbations do, and their traces."""
from __future__ import annotations

import importlib
from functools import cache

import pytest
import torch

import autoshard
from autoshard import Pipeline
from autoshard.base.plan import Plan
from autoshard.errors import UsageError
from autoshard.pipeline.exchange import Part, parts
from autoshard.pipeline.pipelined import pipelined_as, stage_plan
from autoshard.simulation.result import Simulation
from autoshard.simulation.source import traced_for
from autoshard.simulation.trace import trace_events


def gpt() -> tuple:
    module = importlib.import_module("models.gpt")
    with torch.device("meta"):
        return (*module.build("tiny", batch=8), module.loss)


@cache
def planned(schedule: str, mesh: str = "pp=2,dp=2") -> Plan:
    model, inputs, loss = gpt()
    return autoshard.plan(model, mesh, inputs, loss_fn=loss, cluster="cpu-gloo",
                          pipeline=Pipeline(microbatches=4, cuts=("h.1",), schedule=schedule))


def tied_parts(plan: Plan) -> list[Part]:
    model, inputs, loss = gpt()
    made = pipelined_as(traced_for(plan, model, inputs, {}, loss).graph, plan)
    return list(parts(made, [stage_plan(plan, made, s) for s in range(made.table.stages)]))


def simulated(plan: Plan, **conditions) -> Simulation:
    model, inputs, loss = gpt()
    return autoshard.simulate(plan, model, inputs, loss_fn=loss, **conditions)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb1p"])
def test_the_step_is_the_objective_and_time_is_accounted_for(schedule: str) -> None:
    plan = planned(schedule)
    found = simulated(plan)
    assert found.step_s == pytest.approx(plan.objective_s, rel=1e-9)
    assert found.work_s + sum(row.mean_s for row in found.idle) == pytest.approx(found.step_s, rel=1e-9)
    assert {"pipeline"} <= {row.why for row in found.idle}
    assert [row["stage"] for row in found.stages] == [0, 1] and all(row["forward_s"] > 0 for row in found.stages)
    assert (found.stages[0]["weight_s"] > 0) == (schedule == "zb1p")
    assert 0 < found.mfu <= found.hfu < 1


def test_a_slow_rank_slows_its_stage() -> None:
    plan = planned("1f1b")
    fast, slow = simulated(plan), simulated(plan, slow_ranks={3: 2.0})
    assert slow.stages[0]["forward_s"] == fast.stages[0]["forward_s"]
    assert fast.stages[1]["forward_s"] < slow.stages[1]["forward_s"] <= 2 * fast.stages[1]["forward_s"]
    assert fast.step_s < slow.step_s < 2 * fast.step_s
    with pytest.raises(UsageError, match="there is no rank 4"):
        simulated(plan, slow_ranks={4: 2.0})


def test_a_slow_link_slows_what_is_sent() -> None:
    plan = planned("1f1b")
    assert simulated(plan, slow_links={plan.cluster["links"][0]["name"]: 0.1}).step_s > simulated(plan).step_s


def test_the_trace_has_every_action_once() -> None:
    plan = planned("1f1b")
    found = simulated(plan)
    events = [e for e in trace_events(found.tracks) if e["ph"] == "X"]
    forwards = sorted(e["name"] for e in events if e["cat"] == "F")
    assert forwards == sorted(f"{s}F{m}" for s in range(2) for m in range(4))
    assert {e["pid"] for e in events} == {0, 2}, "the first rank of each coordinate of the pipeline"
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(1e6 * found.step_s)
    for pid in (0, 2):
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["pid"] == pid and e["tid"] == 0)
        assert all(a[1] <= b[0] + 1e-6 for a, b in zip(spans, spans[1:]))
    assert {t.rank for t in simulated(plan, ranks=[3]).tracks} == {3}


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p"])
def test_links_over_time_add_up_to_what_the_first_rank_sends(schedule: str) -> None:
    """Its collectives, once per micro-batch, and its activations on their way to the next stage."""
    found = simulated(planned(schedule))
    over_time = {t.link: t for t in found.traffic}
    assert over_time.keys() == {use.link for use in found.links} and over_time
    for use in found.links:
        time = over_time[use.link]
        assert sum(time.nbytes) == pytest.approx(use.nbytes, rel=1e-9) and use.nbytes > 0
        assert sum(time.utilisation) * time.part_s == pytest.approx(use.busy_s, rel=1e-9)
        assert len(time.nbytes) * time.part_s == pytest.approx(found.step_s)


def test_without_collectives_the_links_carry_what_the_plan_sends() -> None:
    """One rank per stage: the first one sends its activations and its part of tied gradients, and nothing at other times."""
    plan = planned("1f1b", "pp=2")
    found = simulated(plan)
    assert not found.sizes, "no collectives"
    sent = 4 * sum(t["nbytes"] for t in plan.pipeline["transfers"] if t["from"] == 0 and t["window"] == "forward")
    tied = sum(sum(t.nbytes) for t in found.traffic) - sent
    assert sent > 0 and tied == pytest.approx(sum(p.nbytes for p in tied_parts(plan) if p.source == 0))
    assert min(found.traffic[0].nbytes) == 0.0
