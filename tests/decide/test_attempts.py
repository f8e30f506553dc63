"""Attempts are tried in order: what fits and is cheapest is taken, and only a bound of every plan proves it."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from steering import formulation_of, traced

from autoshard.decide.how import How
from autoshard.decide.make_plan import Timelines
from autoshard.decide.memory.attempts import EVERY, SHORT, TRAINING, UNREFINED, UNSURE, Attempt, Outcome, try_in_order
from autoshard.decide.program import NOTHING, Program, starting_plans
from autoshard.decide.variants import Variants
from autoshard.search import Clock
from autoshard.search.problem import Solution, Status, evaluate


@pytest.fixture(scope="module")
def program() -> Program:
    """Its starting plans differ in what they need, and half of that does not fit."""
    formulation = formulation_of(traced("mlp"), "d=2")
    free = Program(formulation, Timelines(formulation, {}), starting_plans(formulation))
    peaks = sorted(free.timelines(c).peak for c in free.starts)
    assert peaks[0] < peaks[-1]
    return replace(free, formulation=replace(formulation, budget=formulation.budget.of_peak((peaks[0] + peaks[-1]) / 2)))


def choices(program: Program, fit: bool) -> list[np.ndarray]:
    """Starting plans that fit, or do not, the cheapest first."""
    return sorted((c for c in program.starts if program.fits(c) is fit), key=lambda c: evaluate(program.formulation.problem, c))


def giving(choice: np.ndarray | None, bound: float = -np.inf, status: Status = Status.GAP, **rest) -> Attempt:
    """An attempt on the plain program that ends with `choice`."""
    def search(program: Program, how: How) -> Solution:
        cost = np.inf if choice is None else evaluate(program.formulation.problem, choice)
        return Solution(choice, cost, bound, status, 0.0)

    return Attempt(lambda variants: variants.plain, search, **rest)


def never(variants: Variants) -> Program:
    raise RuntimeError("this attempt must not be tried")


def outcome(program: Program, *attempts: Attempt, clock: Clock | None = None) -> Outcome:
    return try_in_order(Variants(program, How(clock or Clock(60.0))), attempts)


def test_a_plan_that_does_not_fit_leaves_its_bound(program):
    dear, cheap = choices(program, True)[-1], choices(program, False)[0]
    cost = evaluate(program.formulation.problem, dear)
    found = outcome(program, giving(cheap, bound=0.5 * cost, covers=EVERY, enough=True), giving(dear, bound=0.9 * cost))
    assert np.array_equal(found.solution.choice, dear) and found.solution.bound == 0.5 * cost, "0.9 is no bound of every plan"
    assert found.solution.status is Status.GAP and not found.final


def test_a_bound_of_every_plan_proves_what_another_attempt_found(program):
    fitting = choices(program, True)[0]
    cost = evaluate(program.formulation.problem, fitting)
    found = outcome(program, giving(None, bound=cost, status=Status.UNKNOWN, covers=EVERY), giving(fitting))
    assert found.solution.status is Status.OPTIMAL and found.solution.bound == cost


def test_the_first_plan_that_is_enough_ends_it_as_its_search_said(program):
    found = outcome(program, giving(choices(program, True)[0], status=Status.OPTIMAL_TIED, covers=EVERY, enough=True), Attempt(never, never))
    assert found.final and found.solution.status is Status.OPTIMAL_TIED


def test_what_is_infeasible_for_every_plan_ends_it(program):
    found = outcome(program, giving(None, status=Status.INFEASIBLE, bound=np.inf, covers=EVERY), Attempt(never, never))
    assert found.solution.status is Status.INFEASIBLE and not found.found


def test_what_is_infeasible_for_some_plans_does_not(program):
    fitting = choices(program, True)[0]
    assert outcome(program, giving(None, status=Status.INFEASIBLE, bound=np.inf), giving(fitting)).found


def test_the_cheapest_that_fits_is_taken_and_what_is_not_due_not_tried(program):
    cheap, dear = choices(program, True)[0], choices(program, True)[-1]
    assert evaluate(program.formulation.problem, cheap) < evaluate(program.formulation.problem, dear)
    for order in ((cheap, dear), (dear, cheap)):
        found = outcome(program, *map(giving, order), Attempt(never, never, due=lambda variants, so_far: not so_far.found))
        assert np.array_equal(found.solution.choice, cheap)


def test_after_ctrl_c_the_status_says_so(program):
    clock = Clock(60.0)
    clock.stop = True
    assert outcome(program, giving(choices(program, True)[0]), clock=clock).solution.status is Status.INTERRUPTED
    assert outcome(program, giving(None), clock=clock).solution.status is not Status.INTERRUPTED


def test_nothing_tried_is_nothing_found(program):
    found = outcome(program)
    assert found.solution.choice is NOTHING.choice is None and found.solution.status is Status.UNKNOWN


def test_no_time_is_kept_to_refine_a_starting_plan_where_none_fits(program):
    """Both shares were taken off: a quarter of the time was left for the search that mattered (gpt of 350M in 60 % of its memory)."""
    open_search, how = TRAINING[2], How(Clock(60.0))
    nothing_fits = replace(program, starts=tuple(choices(program, False)))
    assert open_search.share(Variants(nothing_fits, how, how)) == SHORT * UNSURE
    assert open_search.share(Variants(program, how, how)) == SHORT * UNREFINED and open_search.share(Variants(program, how)) == SHORT
