"""A plan as a choice of the program whose recomputation is not decided. With all recomputed that may be: the same layouts, in less memory and at no
less cost. With nothing recomputed: the same plan."""
from __future__ import annotations

import numpy as np
import pytest
from steering import formulation_of, traced

from autoshard.decide.how import How
from autoshard.decide.make_plan import Timelines
from autoshard.decide.program import Program, starting_plans
from autoshard.decide.variants import Variants
from autoshard.decide.walks.recomputing import Recomputing
from autoshard.recompute.undecided import decided, first_run
from autoshard.search import Clock, solve
from autoshard.search.problem import evaluate, row_loads


@pytest.fixture(params=[(model, mesh) for model in ("gpt", "t5", "llama", "vit") for mesh in ("d=2", "d=2,t=2")], ids=" ".join, scope="module")
def programs(request):
    """(the program without recomputation, its best choice, the program in which it is not decided)"""
    model, mesh = request.param
    plain = formulation_of(traced(model), mesh)
    program = Program(plain, Timelines(plain, {}), starting_plans(plain))
    program.learned.keep(solve(plain.problem, time_limit=20.0, starts=program.starts))
    return program, program.learned.choices[-1], Variants(program, How(Clock(20.0))).open


def test_what_is_recomputed_takes_less_memory_and_no_less_time(programs):
    program, best, undecided = programs
    plain, change = program.formulation, Recomputing(program.formulation, undecided.formulation)
    made = [change.everything(best, gathered) for gathered in (False, True)]
    assert all(np.isfinite(evaluate(undecided.formulation.problem, choice)) for choice in made)
    assert all(any((choice == known).all() for known in undecided.learned.choices) for choice in made)
    before, after = plain.strategy_of(best), undecided.formulation.strategy_of(made[0])
    assert all(after[name] == at for name, at in before.items())
    assert evaluate(undecided.formulation.problem, made[0]) >= evaluate(plain.problem, best) * (1 - 1e-9)
    assert undecided.timelines(made[0]).peak < program.timelines(best).peak
    again, _ = decided(undecided.formulation.table, after)
    second = [first_run(op.name) for op in again.graph.ops if op.name not in plain.table.graph.by_name]
    assert second and all(after[name] == after[f"{name}_again"] for name in second), "a recomputed op has the placements of the first one"


def test_nothing_recomputed_is_the_same_plan(programs):
    program, best, undecided = programs
    made = Recomputing(program.formulation, undecided.formulation).nothing(best)
    again, picked = decided(undecided.formulation.table, undecided.formulation.strategy_of(made))
    assert again.graph.hash == program.formulation.table.graph.hash and picked == program.formulation.strategy_of(best)
    assert evaluate(undecided.formulation.problem, made) == pytest.approx(evaluate(program.formulation.problem, best), rel=1e-6)
    assert undecided.timelines(made).peak == program.timelines(best).peak


def test_searches_with_little_memory_know_what_is_far_over_and_far_below(programs):
    program, best, undecided = programs
    peaks = [undecided.timelines(choice).peak for choice in undecided.learned.near]
    assert all(np.isfinite(evaluate(undecided.formulation.problem, choice)) for choice in undecided.learned.near)
    assert max(peaks) == program.timelines(best).peak and min(peaks) < max(peaks)


def test_what_rows_are_worth_is_not_guessed_where_a_choice_pays_for_overlap():
    plain = formulation_of(traced("gpt"), "d=2")
    starts = starting_plans(plain)
    paid = np.isfinite(plain.problem.row_price)
    over = [choice for choice in starts if (row_loads(plain.problem, choice) > plain.problem.row_limit)[paid].any()]
    within = [choice for choice in starts if not (row_loads(plain.problem, choice) > plain.problem.row_limit)[paid].any()]
    assert over and within, "starts of both kinds are needed"

    def near(choice):
        program = Program(plain, Timelines(plain, {}), starts)
        program.learned.choices = [choice]
        return Variants(program, How(Clock(20.0))).open.learned.near

    assert len(near(within[0])) == 2 and near(over[0]) == ()
