"""Seconds of a schedule add up to the plan's objective, and to the step as it runs."""
from __future__ import annotations

import pytest
from test_schedule import SLOW_DEVICE, planned

from autoshard.base.mesh import parse_mesh
from autoshard.cost.cluster import load_cluster
from autoshard.cost.shared_calls import SMALL, UNKNOWN, Together, share_seconds
from autoshard.lower.schedule import CollectiveCall, Instruction, WindowSchedule
from autoshard.lower.seconds import Prices, priced, saved_by_buckets
from autoshard.rules import registry

SEEDS = {"input:*": "a,..."}
CASES = [("gpt", "a=2,b=2", SLOW_DEVICE), ("gpt", "a=2,b=4", "h100-dgx"), ("llama", "a=4", "h100-dgx"), ("resnet", "a=2", "cpu-gloo")]


def total(ins: Instruction) -> float:
    return (ins.seconds or 0.0) + sum(c.seconds for c in ins.calls)


def communication(window: WindowSchedule, overlaps: bool) -> tuple[float, float]:
    """(hideable, blocking), inner collectives among the latter."""
    moves = [i for i in window.instructions if i.kind == "redistribute"]
    hide = sum(total(i) for i in moves if i.hideable and overlaps)
    return hide, sum(total(i) for i in moves if not (i.hideable and overlaps)) + sum(
        c.seconds for i in window.instructions if i.kind == "compute" for c in i.calls)


@pytest.mark.parametrize("name, mesh, cluster", CASES)
def test_they_add_up_to_the_step_as_it_runs(name: str, mesh: str, cluster: str) -> None:
    graph, plan, order = planned(name, mesh, cluster=cluster, seeds=SEEDS if name == "gpt" else {})
    profile = load_cluster(cluster)
    order, overlap = priced(order, graph, plan, profile), profile.overlap
    computes = [(graph.op(i.op), i.seconds) for w in order.windows for i in w.instructions if i.kind == "compute"]
    assert sum(s for _, s in computes) == pytest.approx(plan.predicted["compute_s"], rel=1e-9)
    step = plan.predicted["compute_s"] + plan.predicted["optimizer_s"]
    for window in order.windows:
        hide, block = communication(window, overlap.eta > 0)
        heavy = sum(s for op, s in computes if op.phase == window.name and registry.is_heavy(op))
        exposed = max(0.0, hide - overlap.eta * heavy)
        step += block + overlap.interference * hide + (1.0 - overlap.interference) * exposed
    assert step == pytest.approx(plan.predicted["bucketed_s"], rel=1e-9)


def test_planned_calls_add_up_to_the_objective() -> None:
    """Without overlap: the step as it runs and what buckets save."""
    graph, plan, order = planned("gpt", "a=2", cluster=SLOW_DEVICE, seeds=SEEDS)
    assert load_cluster(SLOW_DEVICE).overlap.eta == 0.0
    saved = saved_by_buckets(order, graph, plan, load_cluster(SLOW_DEVICE))
    assert saved["forward"] == 0.0 != saved["backward"]
    assert plan.predicted["bucketed_s"] + saved["backward"] == pytest.approx(plan.objective_s, rel=1e-9)


def test_small_gradients_together_take_one_call_and_its_copy() -> None:
    """Of all of them, and of a few the same part of the fixed cost. A call of its own is never dearer than a share."""
    profile, mesh = load_cluster("cpu-gloo"), parse_mesh("a=2")
    link, sizes = profile.links_for(mesh)[0], [512] * 30 + [4096] * 5
    others = Together(len(sizes), sum(sizes))
    prices = Prices(mesh, profile, others)
    call = prices.of_call(CollectiveCall("all_reduce", "a", sum(sizes))) + prices.of_copy(sum(sizes))
    shares = [share_seconds("all_reduce", n, others, link, profile.device) for n in sizes]
    assert sum(shares) == pytest.approx(call, rel=1e-9)
    assert call < 0.2 * sum(prices.of_call(CollectiveCall("all_reduce", "a", n)) for n in sizes)
    assert share_seconds("all_reduce", 512, UNKNOWN, link, profile.device) == 0.0
    assert share_seconds("all_reduce", SMALL, others, link, profile.device) <= prices.of_call(CollectiveCall("all_reduce", "a", SMALL))


def test_what_a_bucket_saves_by_hand() -> None:
    """Calls of 4 KiB and 8 KiB as one of 12 KiB, and the copy into its buffer."""
    prices = Prices(parse_mesh("d=2"), load_cluster("cpu-gloo"))
    call = CollectiveCall("all_reduce", "d", 12288, (4096, 8192))
    alone = sum(prices.of_call(CollectiveCall("all_reduce", "d", n)) for n in (4096, 8192))
    assert prices.saved(Instruction("redistribute", calls=(call,))) == pytest.approx(
        alone - prices.of_call(CollectiveCall("all_reduce", "d", 12288)) - prices.of_copy(12288), rel=1e-12)
    assert prices.saved(Instruction("redistribute", calls=(CollectiveCall("all_reduce", "d", 12288),))) == 0.0
