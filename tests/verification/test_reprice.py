"""A walk over the lowered graphs finds the plan's price and its collectives, without the search's tables."""
from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from autoshard.base.mesh import parse_mesh
from autoshard.cost.cluster import load_cluster
from autoshard.decide.options import Options
from autoshard.lower.lower import lower
from autoshard.lower.schedule import schedule
from autoshard.planner.one_stage import decide, prices
from autoshard.planner.stages import plan_traced
from autoshard.program.trace import trace
from autoshard.runtime.route import route_of
from autoshard.verification.reprice import collectives_in, reprice
from models import gpt, mlp
from tests.support.experts import build, travelling

CASES = [
    (mlp, "dp=4", {"input:0": ("dp", None)}),
    (gpt, "dp=2,tp=2", {"input:0": ("dp", None), "h.*.mlp.c_fc.weight": ("tp", None), "wpe.weight": (None, "dp"),
                        "wte.weight": ("tp", "dp")}),
]


@pytest.mark.parametrize("cluster", ["cpu-gloo", "h100-dgx"])
@pytest.mark.parametrize("module, mesh, seeds", CASES)
def test_lowered_program_costs_what_was_planned(module, mesh: str, seeds: dict, cluster: str) -> None:
    model, batch = module.build()
    traced, on = trace(model, batch, loss_fn=module.loss), parse_mesh(mesh)
    plan = plan_traced(traced, on, Options(cluster=cluster, seeds=seeds), has_loss=True)
    graph = traced.graph
    lowered = lower(graph, plan, on, schedule(graph, plan, on, route_of(plan)))
    found = reprice(graph, lowered, load_cluster(cluster), "adamw")
    assert found.planned_s == pytest.approx(plan.objective_s, rel=1e-9)
    assert found.executed_s == pytest.approx(plan.predicted["bucketed_s"], rel=1e-9)
    planned = Counter((c.kind, c.axis, c.nbytes, c.phase) for c in plan.collectives)
    seen = collectives_in(lowered)
    assert planned and Counter((c.kind, c.axis, c.nbytes, s.window) for s in seen for c in s.planned()) == planned
    assert any(s.bucket for s in seen) == (found.executed_s != found.planned_s)


@pytest.mark.parametrize("imbalance", [1.0, 1.5])
def test_uneven_loads_of_experts_are_in_the_price(imbalance: float) -> None:
    """Layers whose rows travel: ops and their exchanges take the busiest rank's time."""
    pytest.importorskip("transformers")
    model, (ids,) = build("exact")
    traced, on, options = trace(model, (), {"input_ids": ids, "labels": ids}), parse_mesh("dp=2,ep=2"), Options(cluster="cpu-gloo")
    even = load_cluster("cpu-gloo")
    uneven = replace(even, device=replace(even.device, imbalance=imbalance))
    plan = decide(travelling(prices(traced, on, options, profile=uneven)), options, finer=False)
    assert any(c.kind == "all_to_all_rows" for c in plan.collectives)
    lowered = lower(traced.graph, plan, on, schedule(traced.graph, plan, on, route_of(plan)))
    assert reprice(traced.graph, lowered, uneven, "adamw").planned_s == pytest.approx(plan.objective_s, rel=1e-9)
    assert (reprice(traced.graph, lowered, even, "adamw").planned_s < 0.999 * plan.objective_s) == (imbalance > 1)
