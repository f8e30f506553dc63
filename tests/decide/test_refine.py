"""After the search over decision units: plans in which layouts change inside units, where they are cheaper."""
from __future__ import annotations

import numpy as np
import pytest
from steering import traced

from autoshard.base.mesh import parse_mesh
from autoshard.decide import refine
from autoshard.decide.backends import Found, find
from autoshard.decide.how import How
from autoshard.decide.options import Options
from autoshard.decide.program import Program, formulate_within, with_starts
from autoshard.planner.one_stage import prices
from autoshard.report import text
from autoshard.search import Clock
from autoshard.search.problem import Solution, Status, evaluate
from autoshard.space.decision_units import singletons

OPTIONS = Options(cluster="cpu-gloo")


def program_on(mesh: str, name: str = "gpt", size: str = "124M") -> Program:
    """Real widths and one layer, a batch of one."""
    table = prices(traced(name, size, layers=1, batch=1), parse_mesh(mesh), OPTIONS)
    return with_starts(formulate_within(table, OPTIONS.memory_limit(table.cluster)), OPTIONS.settings(True, True))


@pytest.fixture(scope="module")
def program() -> Program:
    return program_on("a=2,b=4")


@pytest.fixture(scope="module")
def over_units(program) -> Found:
    return find(program, How(Clock(60.0), finer=False))


def test_a_plan_inside_units_is_found_and_never_called_more_than_is_proven(program, over_units):
    found = find(program, How(Clock(60.0)))
    assert over_units.solution.status is Status.OPTIMAL
    assert found.solution.cost < 0.997 * over_units.solution.cost, "op by op saves 0.6 % here"
    assert all(len(unit.members) == 1 for unit in found.program.formulation.units.units)
    assert found.solution.bound == found.solution.cost, "no plan over units is cheaper: that much stays proven"
    assert found.solution.cost == evaluate(found.program.formulation.problem, found.solution.choice)
    plan = found.plan(program.formulation.table, {}, {})
    assert plan.objective_s == pytest.approx(found.solution.cost, rel=1e-9), "prices of the layouts themselves"
    assert "% cheaper than the best plan over decision units" in plan.search[refine.FACT]
    assert plan.refined and plan.status == "optimal over decision units, refined op by op"
    assert text.status(plan).endswith("a step (no plan over decision units is cheaper)")


def replicated(program: Program) -> Solution:
    """A poor plan over units, as a search that was cut short may leave one, and a bound below it."""
    return Solution(program.starts[0], evaluate(program.formulation.problem, program.starts[0]), 0.0, Status.TIME_LIMIT, 0.0)


def test_the_cheapest_starting_plan_is_improved_too_and_the_cheaper_is_taken(program, monkeypatch):
    """Where no neighbourhood is cheaper, the cheaper start is the plan; and without a second one nothing is."""
    monkeypatch.setattr(How, "improve", lambda self, problem, start: (start, evaluate(problem, start)))
    problem, poor = program.formulation.problem, replicated(program)
    least = min(evaluate(problem, choice) for choice in program.starts)
    refined, found = refine.refine(program, poor, How(Clock(60.0)))
    assert found.cost == pytest.approx(least, rel=1e-9) and found.cost < 0.9 * poor.cost
    assert found.cost == evaluate(refined.formulation.problem, found.choice)
    assert found.status is Status.TIME_LIMIT and "cheaper than the best plan found over decision units" in found.stats[refine.FACT]
    monkeypatch.setattr(refine, "TWICE", 0)
    assert refine.refine(program, poor, How(Clock(60.0)))[1].cost == poor.cost


def test_a_start_is_improved_once(program):
    finer = formulate_within(program.formulation.table, program.formulation.budget.limit, singletons(program.formulation.table))
    cheapest = min(program.starts, key=lambda choice: evaluate(program.formulation.problem, choice))
    assert len(list(refine.starts(program, cheapest, finer))) == 1
    assert len(list(refine.starts(program, program.starts[0], finer))) == 2


@pytest.mark.slow
def test_t5_on_two_axes_is_refined_to_what_op_by_op_is_known_to_save():
    """From the best plan over units alone the neighbourhoods of t5 end 0.03 % below it, from the cheapest starting plan 1.2 % below."""
    program = program_on("a=2,b=4", "t5", "small")
    over_units = find(program, How(Clock(120.0), finer=False)).solution
    assert refine.refine(program, over_units, How(Clock(60.0)))[1].cost < 0.99 * over_units.cost


def test_the_plan_over_units_is_a_choice_of_the_finer_problem(program, over_units):
    finer = formulate_within(program.formulation.table, program.formulation.budget.limit, singletons(program.formulation.table))
    choice = refine.lifted(program.formulation, over_units.solution.choice, finer)
    assert finer.strategy_of(choice) == program.formulation.strategy_of(over_units.solution.choice)
    assert evaluate(finer.problem, choice) == pytest.approx(over_units.solution.cost, rel=1e-9)


def test_what_is_too_large_stays_as_it_is_and_says_so(program, over_units, monkeypatch):
    monkeypatch.setattr(refine, "MOST", 100)
    same, solution = refine.refine(program, over_units.solution, How(Clock(60.0)))
    assert same is program and np.array_equal(solution.choice, over_units.solution.choice)
    assert "not tried" in solution.stats[refine.FACT] and "more than 100" in solution.stats[refine.FACT]


def test_a_cheaper_plan_that_does_not_fit_is_left(program, over_units, monkeypatch):
    monkeypatch.setattr(Program, "fits", lambda self, choice: self is program)
    same, solution = refine.refine(program, over_units.solution, How(Clock(60.0)))
    assert same is program and solution.cost == over_units.solution.cost
    assert "does not fit" in solution.stats[refine.FACT]


def test_units_of_one_axis_are_fine_already():
    program = program_on("a=2")
    found = Solution(program.starts[0], evaluate(program.formulation.problem, program.starts[0]), 0.0, Status.GAP, 0.0)
    assert not refine.may_refine(program.formulation.table)
    assert refine.refine(program, found, How(Clock(60.0))) == (program, found)
