"""Optimizer state on the host: where it pays, what it costs, and that plans, prices and reports know of it."""
from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import nn

from autoshard.api import plan
from autoshard.base.mesh import parse_mesh
from autoshard.base.plan import CATEGORIES, Plan
from autoshard.base.spec import local_shape
from autoshard.cost.cluster import load_cluster
from autoshard.cost.compute import host_seconds, optimizer_seconds
from autoshard.cost.memory import scalar_bytes, state_bytes, update_workspace
from autoshard.decide.make_plan import Timelines, chosen_by, price
from autoshard.decide.memory.offload import move_to_fit, on_device
from autoshard.decide.options import Options
from autoshard.decide.program import Program, formulate_within
from autoshard.decide.walks.greedy import greedy_plans
from autoshard.errors import InfeasibleError, UsageError
from autoshard.formulate.problem_of import formulate
from autoshard.lower.lower import lower
from autoshard.lower.schedule import schedule
from autoshard.planner.one_stage import decide, prices
from autoshard.program.trace import trace
from autoshard.report import what
from autoshard.runtime.route import route_of
from autoshard.search import solve
from autoshard.search.problem import evaluate, row_loads
from autoshard.space.cost_table import CostTable
from autoshard.space.decision_units import singletons
from autoshard.study.diff import diff
from autoshard.study.explain import chosen_by as chosen_by_plan
from autoshard.study.explain import op_table
from autoshard.verification.reprice import reprice
from models import mlp

OPTIONS = Options(cluster="h100-dgx", time_limit=60.0, offload="optimizer")
BUDGET = 550e3
H100 = load_cluster("h100-dgx").device


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(*shape)) for shape in ((64, 128), (128, 256), (256, 32)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (((x @ self.a).relu() @ self.b).tanh() @ self.c).sum()


@pytest.fixture(scope="module")
def table() -> CostTable:
    return prices(trace(*_mlp(), loss_fn=mlp.loss), parse_mesh("d=2"), OPTIONS)


@pytest.fixture(scope="module")
def lean(table: CostTable) -> Plan:
    return decide(table, replace(OPTIONS, memory_budget=BUDGET), has_loss=True)


def subsets(plain: CostTable):
    """(how many, seconds, bytes at the turn, bytes at the update) with every set of parameters offloaded, on one rank: there is
    nothing to lay out."""
    formulation = formulate(plain, units=singletons(plain))
    choice = solve(formulation.problem).choice
    seconds, loads = evaluate(formulation.problem, choice), row_loads(formulation.problem, choice)
    turn, update = (loads[formulation.memory_rows[moment]] for moment in ("turn", "update"))
    sizes = [op.outputs[0].nbytes for op in plain.graph.of_kind("param")]
    for n in range(len(sizes) + 1):
        for away in combinations(sizes, n):
            more = sum(host_seconds("adamw", b, H100) - optimizer_seconds("adamw", b, H100) for b in away)
            yield n, seconds + more, turn - 2 * sum(away), update - (2 + 1) * sum(away)


def test_the_choice_is_the_best_of_all_subsets() -> None:
    traced, mesh = trace(Three(), (torch.randn(16, 64),)), parse_mesh("d=1")
    every = list(subsets(prices(traced, mesh, replace(OPTIONS, offload="none"))))
    opened, seen = prices(traced, mesh, OPTIONS), set()
    for limit in sorted({max(turn, update) for _, _, turn, update in every}):
        formulation = formulate(opened, memory_limit=limit, units=singletons(opened))
        found = solve(formulation.problem)
        best, n = min((seconds, n) for n, seconds, turn, update in every if max(turn, update) <= limit)
        assert found.cost == pytest.approx(best, rel=1e-9)
        chosen = chosen_by(formulation, found.choice)
        assert len(chosen.on_host) == n
        assert price(chosen)["step_s"] == pytest.approx(best, rel=1e-9)
        seen.add(n)
    assert seen == {0, 1, 2, 3}


def test_nothing_is_offloaded_where_memory_is_ample(table: CostTable) -> None:
    free = decide(table, OPTIONS)
    assert free.offload == () and "host" not in free.memory and "host_s" not in free.predicted
    closed = prices(trace(*_mlp(), loss_fn=mlp.loss), table.mesh, replace(OPTIONS, offload="none"))
    assert free.objective_s == pytest.approx(decide(closed, replace(OPTIONS, offload="none")).objective_s, rel=1e-12)
    assert all(found.on_host is None for found in closed.strategies.values())


def _mlp():
    return mlp.build(widths=(128,) * 5, batch=16)


def test_a_plan_that_offloads_fits_and_is_counted(table: CostTable, lean: Plan) -> None:
    assert lean.offload and lean.memory["total"] == max(m.total for m in lean.fullest.timeline) <= BUDGET
    stored = {op.target: op for op in table.graph.of_kind("param")}
    local = {n: local_shape(op.outputs[0].logical_shape, lean.placements[n], (2,)) for n, op in stored.items()}
    state = {n: state_bytes("adamw", shape, torch.float32) for n, shape in local.items()}
    assert lean.memory["host"] == sum(state[n] for n in lean.offload)
    here = [n for n in stored if n not in lean.offload]
    update = dict(zip(CATEGORIES, lean.fullest.timeline[-1].live, strict=True))
    assert lean.fullest.timeline[-1].window == "update" and update["optimizer"] == sum(state[n] for n in here) + scalar_bytes("adamw", len(stored))
    moving = max(state[n] + state[n] // 2 for n in lean.offload)  # AdamW: one temporary of the parameter's size
    assert update["temporaries"] == max(moving, update_workspace("adamw", [state[n] // 2 for n in here], True))
    assert any(f"state of {len(lean.offload)} parameter" in note and "local_update" in note for note in lean.notes)
    assert sum(a.value for a in what.memory(lean)) == pytest.approx(lean.memory["total"])


def test_rows_never_count_more_than_the_peak(table: CostTable) -> None:
    formulation = formulate_within(table, OPTIONS.memory_limit(table.cluster))
    played = Timelines(formulation, {})
    known = [choice for _, choice in greedy_plans(formulation)]
    tight = replace(formulation, budget=formulation.budget.of_peak(min(played(c).peak for c in known) - 1))
    known += [c for c in (move_to_fit(Program(tight, played), c) for c in known) if c is not None]
    assert len({len(chosen_by(formulation, c).on_host) for c in known}) > 1
    closed = on_device(formulation).problem
    assert all(np.isfinite(evaluate(closed, c)) == (not chosen_by(formulation, c).on_host) for c in known)
    for choice in known:
        loads = row_loads(formulation.problem, np.asarray(choice))
        assert max(loads[row] for row in formulation.memory_rows.values()) <= played(choice).peak
        assert price(chosen_by(formulation, choice))["step_s"] == pytest.approx(evaluate(formulation.problem, choice), rel=1e-9)


def test_the_lowered_program_costs_what_was_planned(table: CostTable, lean: Plan) -> None:
    lowered = lower(table.graph, lean, lean.mesh, schedule(table.graph, lean, lean.mesh, route_of(lean)))
    assert reprice(table.graph, lowered, table.cluster, "adamw", lean.offload).planned_s == pytest.approx(lean.objective_s, rel=1e-9)
    assert reprice(table.graph, lowered, table.cluster, "adamw").planned_s < 0.9 * lean.objective_s


def test_plans_are_read_back_and_older_ones_too(lean: Plan) -> None:
    assert Plan.from_json(lean.to_json()) == lean
    older = {k: v for k, v in json.loads(lean.to_json()).items() if k != "offload"}
    assert Plan.from_json(json.dumps(older)).offload == ()


def test_explain_and_diff_tell_host_from_device(table: CostTable, lean: Plan) -> None:
    chosen = chosen_by_plan(lean, table)
    assert tuple(op.target for op in chosen.on_host) == lean.offload
    assert price(chosen)["step_s"] == pytest.approx(lean.objective_s, rel=1e-12)
    name = chosen.on_host[0].name
    rows = op_table(chosen, name).rows
    assert rows[0].chosen and "optimizer state on the host" in rows[0].outputs
    assert any(row.outputs == rows[0].outputs[:1] and row.regret_s < 0 for row in rows), "without the budget it would stay here"
    settings = {c.name: (c.before, c.after) for c in diff(replace(lean, offload=()), lean).settings}
    assert settings == {f"optimizer state of {n}": ("device", "host") for n in lean.offload}


def test_without_offload_the_same_budget_is_too_small_and_the_message_says_so() -> None:
    options = replace(OPTIONS, offload="none", memory_budget=BUDGET)
    with pytest.raises(InfeasibleError, match=r"let optimizer state lie on the host \(offload='optimizer'\)"):
        decide(prices(trace(*_mlp(), loss_fn=mlp.loss), parse_mesh("d=2"), options), options)


@pytest.mark.parametrize("asked, message", [
    ({"cluster": "cpu-gloo"}, r"no link to its host; add \[device.host_link\]"),
    ({"optimizer": "sgd"}, "sgd keeps no state"),
    ({"optimizer": "adafactor"}, "adafactor keeps no state that autoshard.local_update could move"),
    ({"training": False}, "inference has no optimizer state"),
    ({"offload": "activations"}, "offload='activations' is not one of none, optimizer"),
])
def test_what_cannot_be_offloaded_is_an_error(asked: dict, message: str) -> None:
    model, batch = _mlp()
    with pytest.raises(UsageError, match=message):
        plan(model, "d=2", batch, **{"loss_fn": mlp.loss, "cluster": "h100-dgx", "offload": "optimizer", **asked})


def test_inference_is_noticed_after_the_trace_too() -> None:
    model, batch = _mlp()
    with torch.no_grad(), pytest.raises(UsageError, match="inference has no optimizer state"):
        plan(model, "d=2", batch[:1], cluster="h100-dgx", offload="optimizer")
