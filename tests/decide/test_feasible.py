"""Plans within memory: what is known to fit is never passed over for something dearer."""
from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from steering import formulation_of, traced

from autoshard.decide.how import How
from autoshard.decide.make_plan import Timelines
from autoshard.decide.memory.fit import _filled, search_within
from autoshard.decide.program import NOTHING, Program, settled
from autoshard.decide.walks.baselines import baselines
from autoshard.formulate.memory_rows import limited
from autoshard.formulate.problem_of import formulate
from autoshard.search import Clock, solve
from autoshard.search.problem import evaluate, row_loads

LIMIT, LEAN = 1e9, 18700.0


def test_a_known_plan_that_a_corrected_row_forbids_is_still_taken():
    """The first plan found is too full at the update; the row that says so also forbids a plan that does fit."""
    formulation = formulation_of(traced("mlp"), "d=2", memory=LIMIT)
    row = formulation.memory_rows["update"]
    known, lean = (solve(limited(formulation, "update", limit).problem).choice for limit in (30000.0, LEAN))
    cost = {name: evaluate(formulation.problem, c) for name, c in (("known", known), ("lean", lean))}
    assert cost["known"] < cost["lean"] and row_loads(formulation.problem, known)[row] > LEAN

    def measured(choice: np.ndarray) -> SimpleNamespace:
        """The update takes what the row says, but for the known plan, which needs less than the row thinks."""
        load = row_loads(formulation.problem, choice)[row]
        total = LIMIT / (1.0 + formulation.table.cluster.device.allocator_slack) + load - LEAN
        peak = 0.0 if np.array_equal(choice, known) else total
        return SimpleNamespace(peak=peak, live=np.array([[peak]]), moment_of=lambda t: "update")

    found = search_within(Program(formulation, measured, (known,)), How(Clock(60)))
    assert found.cost == pytest.approx(cost["known"], rel=1e-12)
    assert found.bound <= found.cost


@pytest.mark.parametrize(("name", "mesh"), [("mlp", "d=2"), ("dlrm", "d=2")])
def test_within_any_memory_no_baseline_that_fits_is_cheaper(name, mesh):
    free = formulation_of(traced(name), mesh)
    slack = 1.0 + free.table.cluster.device.allocator_slack
    by_hand = [choice for _, choice in baselines(free)]
    played = Timelines(free, {})
    peaks = sorted({slack * played(c).peak for c in by_hand})
    for limit in (peaks[0] * 1.0001, peaks[-1] * 0.95, peaks[-1] * 1.0001):
        formulation = formulate(free.table, memory_limit=limit)
        found = search_within(Program(formulation, played, tuple(by_hand)), How(Clock(60)))
        cheapest = min(evaluate(free.problem, c) for c in by_hand if slack * played(c).peak <= limit)
        assert found.choice is not None and found.cost <= cheapest * (1 + 1e-9), limit
        assert slack * played(found.choice).peak <= limit


@pytest.mark.parametrize("name", ["mlp", "dlrm"])
def test_memory_that_a_plan_leaves_free_makes_it_cheaper(name):
    """From the plan by hand of least memory, within what each of the others takes."""
    free = formulation_of(traced(name), "d=2")
    slack, played = 1.0 + free.table.cluster.device.allocator_slack, Timelines(free, {})
    by_hand = sorted((slack * played(c).peak, i, c) for i, (_, c) in enumerate(baselines(free)))
    lean = by_hand[0][2]
    cost = evaluate(free.problem, lean)
    for limit, _, other in by_hand[1:]:
        formulation = formulate(free.table, memory_limit=1.0001 * limit)
        found = _filled(Program(formulation, played), settled(NOTHING, lean, cost), How(Clock(60)))
        assert found.cost == pytest.approx(evaluate(free.problem, found.choice)) and found.cost <= cost
        assert slack * played(found.choice).peak <= 1.0001 * limit
        assert found.cost < cost or evaluate(free.problem, other) >= cost, "a cheaper plan that fits is known"
