"""Memory in the search: rows count no byte too many, and what is returned fits by its timeline."""
from __future__ import annotations

import importlib
import re
from dataclasses import replace

import numpy as np
import pytest

from autoshard.base.mesh import parse_mesh
from autoshard.base.plan import Plan
from autoshard.decide.make_plan import Timelines
from autoshard.decide.memory.memory_problems import least_memory, least_possible
from autoshard.decide.options import Options, parse_bytes
from autoshard.decide.program import formulate_within
from autoshard.decide.walks.baselines import baselines
from autoshard.decide.walks.greedy import greedy_plans
from autoshard.errors import InfeasibleError
from autoshard.formulate.memory_rows import limited, with_row
from autoshard.planner.one_stage import decide, prices
from autoshard.program.trace import trace
from autoshard.search import solve
from autoshard.search.problem import row_loads
from autoshard.space.cost_table import CostTable

OPTIONS = Options(cluster="h100-dgx", time_limit=120.0)


def table_of(name: str, mesh: str) -> CostTable:
    module = importlib.import_module(f"models.{name}")
    model, batch = module.build()
    return prices(trace(model, batch, loss_fn=module.loss), parse_mesh(mesh), OPTIONS)


@pytest.mark.parametrize("name", ["gpt", "resnet", "t5", "moe"])
def test_rows_never_count_more_than_the_peak(name: str) -> None:
    """Of known plans, and of those that use the least on a row: the bound under the rows holds for every plan."""
    table = table_of(name, "dp=2")
    formulation = formulate_within(table, OPTIONS.memory_limit(table.cluster))
    played, problem = Timelines(formulation, {}), formulation.problem
    choices = [c for _, c in (*greedy_plans(formulation), *baselines(formulation))]
    choices += [solve(least_memory(problem, [row]), time_limit=10).choice for row in formulation.memory_rows.values()]
    for choice in choices:
        loads = row_loads(problem, np.asarray(choice))
        assert max(loads[row] for row in formulation.memory_rows.values()) <= played(choice).peak
        assert all(least_possible(problem, row) <= loads[row] for row in formulation.memory_rows.values())


def test_a_row_for_a_moment_is_exact_for_the_plan_it_was_corrected_by() -> None:
    table = table_of("gpt", "dp=2")
    formulation = formulate_within(table, OPTIONS.memory_limit(table.cluster))
    choice = next(c for _, c in greedy_plans(formulation))
    timeline = Timelines(formulation, {})(choice)
    moment = timeline.moment_of(timeline.peak_time)
    grown = with_row(formulation, moment)
    row = grown.memory_rows[moment]
    load = row_loads(grown.problem, choice)[row]
    assert 0.8 * timeline.peak <= load <= 1.2 * timeline.peak
    corrected = limited(grown, moment, 100.0 - (timeline.peak - load))
    assert corrected.problem.row_limit[row] - load == pytest.approx(100.0 - timeline.peak)
    assert with_row(grown, moment) is grown and limited(corrected, moment, np.inf).problem.row_limit[row] < np.inf


@pytest.mark.parametrize("mesh", ["dp=4"])
def test_plans_shard_more_as_the_budget_shrinks_and_fit(mesh: str) -> None:
    table = table_of("mlp", mesh)
    free = decide(table, OPTIONS)
    plans: list[Plan] = []
    for share in (1.0, 0.8, 0.6, 0.5):
        budget = share * free.memory["total"]
        plans.append(decide(table, Options(**{**vars(OPTIONS), "memory_budget": budget})))
        assert max(m.total for m in plans[-1].fullest.timeline) <= budget
        assert plans[-1].memory["total"] == max(m.total for m in plans[-1].fullest.timeline)
    costs = [p.objective_s for p in plans]
    assert costs == sorted(costs) and costs[0] < costs[-1]
    sharded = [sum(any(p >= 0 for p in s) for s in plan.placements.values()) for plan in plans]
    assert sharded[-1] > sharded[0]


def test_nothing_fits_says_when_and_what() -> None:
    with pytest.raises(InfeasibleError, match=r"proven.*least found needs .* peak is in (backward|update|forward) at .*largest tensors"):
        decide(table_of("mlp", "dp=4"), Options(**{**vars(OPTIONS), "memory_budget": 6000.0}))


@pytest.mark.parametrize(("name", "mesh"), [("mlp", "dp=4"), ("mlp", "dp=2,tp=2")])
def test_the_budget_that_the_error_names_is_enough(name: str, mesh: str) -> None:
    table = table_of(name, mesh)
    with pytest.raises(InfeasibleError) as caught:
        decide(table, replace(OPTIONS, memory_budget=6000.0, time_limit=20.0))
    amount = r"([\d.]+ \wiB)"
    named = re.search(rf"less than {amount} \(proven\), and the least found needs {amount}\..* Raise the memory budget to {amount}",
                      str(caught.value))
    bound, needs, raised = map(parse_bytes, named.groups())
    found = decide(table, replace(OPTIONS, memory_budget=raised), finer=False, enough=1.0)  # the first plan that fits
    assert bound <= found.memory["total"] <= needs == raised
