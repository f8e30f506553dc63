"""The exchange of tied gradients, once a step: what is sent, what it costs, and where the cost is said."""
from __future__ import annotations

from collections import Counter

import pytest
from pipeline_ranks import Threads, ranks_of, train

import autoshard
from autoshard import Pipeline
from autoshard.base.plan import Plan
from autoshard.cost.cluster import load_cluster
from autoshard.pipeline.exchange import exchange_seconds, parts
from autoshard.pipeline.pipelined import stage_plan
from autoshard.pipeline.playback import once_of, playback_of
from autoshard.report.what import step_time
from autoshard.rules.family import Family
from tests.pipeline.cut_models import subject


def plan_of(name: str, mesh: str = "pp=2,dp=2", **options) -> Plan:
    what = subject(name)
    return autoshard.plan(what.model, mesh, what.batch, loss_fn=what.loss, cluster="cpu-gloo", pipeline=Pipeline(microbatches=4, **options))


def test_a_tied_weight_is_a_row_of_the_step():
    """The end of the step is that of the fullest rank: what it does once, and the exchange."""
    plan = plan_of("gpt", cuts=["h.1"], schedule="1f1b")
    exchange = plan.pipeline["exchange"]
    assert len(exchange) == 2 and exchange[0] == exchange[1] > 0
    played = playback_of(plan)
    assert plan.objective_s == pytest.approx(played.makespan + max(once_of(plan, r) for r in (0, 1)), rel=1e-12)
    assert once_of(plan, 0) == pytest.approx(plan.stages[0].once_s + exchange[0])
    assert plan.predicted["exchange_s"] == exchange[0]
    counted = [a for a in step_time(plan) if a.counts]
    assert {a.label: a.value for a in counted}["exchange of tied gradients"] == exchange[0]
    assert sum(a.value for a in counted) == pytest.approx(plan.objective_s, rel=1e-9)
    assert plan.bound_s <= plan.objective_s
    assert Plan.from_json(plan.to_json()).pipeline["exchange"] == exchange


def test_a_model_without_tied_weights_has_none():
    plan = plan_of("llama", cuts=["layers.1"], schedule="1f1b")
    assert not any(plan.pipeline["exchange"]) and "exchange_s" not in plan.predicted


def test_both_directions_at_once_and_the_sum():
    """t5 on three ranks: each sends its part of the embedding to two others, receives two, and adds twice."""
    what = subject("t5", 8, 4)
    plan, steps = ranks_of(what.model, what.batch, "pp=3", Pipeline(microbatches=4, cuts=("decoder.bias", "decoder.norm")), what.loss, Threads)
    train(steps, what.batch)
    made = steps[0].made
    plans = [stage_plan(plan, made, s) for s in range(3)]
    found = list(parts(made, plans))
    sent = [m for s in steps for m in s.runner.wires.sent if m.value.startswith("grad:")]
    assert Counter((p.source, p.target) for p in found) == Counter((m.source, m.target) for m in sent)
    weight = dict(what.model.named_parameters())["shared.weight"]
    assert {p.nbytes for p in found} == {weight.numel() * 8}, "float64, a rank per stage"
    device = load_cluster("cpu-gloo").device
    free = exchange_seconds(made, plans, device, lambda part: 0.0)
    assert exchange_seconds(made, plans, device, lambda part: 1.0) == [2.0 + free[r] for r in range(3)]
    assert free[0] == pytest.approx(2 * 3 * weight.numel() * 8 / device.reached_bandwidth(Family.POINTWISE), rel=0.5)
