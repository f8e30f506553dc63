"""A plan with all recomputed that may be: the same layouts, within the rows, in less memory and at no less cost."""
from __future__ import annotations

import numpy as np
import pytest
from steering import formulation_of, traced

from autoshard.decide.how import How
from autoshard.decide.make_plan import Timelines
from autoshard.decide.program import Program, starting_plans
from autoshard.decide.variants import Variants
from autoshard.decide.walks.recomputing import recomputing
from autoshard.recompute.undecided import decided, first_run
from autoshard.search import Clock, solve
from autoshard.search.problem import evaluate


@pytest.mark.parametrize("model", ["gpt", "t5", "llama", "vit"])
@pytest.mark.parametrize("mesh", ["d=2", "d=2,t=2"])
def test_what_is_recomputed_takes_less_memory_and_no_less_time(model, mesh):
    plain = formulation_of(traced(model), mesh)
    program = Program(plain, Timelines(plain, {}), starting_plans(plain))
    program.learned.keep(solve(plain.problem, time_limit=20.0, starts=program.starts))
    best = program.learned.choices[-1]
    undecided = Variants(program, How(Clock(20.0))).open
    made = recomputing(plain, best, undecided.formulation)
    assert all(np.isfinite(evaluate(undecided.formulation.problem, choice)) for choice in made)
    assert made and all(any((choice == known).all() for known in undecided.learned.choices) for choice in made)
    before, after = plain.strategy_of(best), undecided.formulation.strategy_of(made[0])
    assert all(after[name] == at for name, at in before.items())
    assert evaluate(undecided.formulation.problem, made[0]) >= evaluate(plain.problem, best) * (1 - 1e-9)
    assert undecided.timelines(made[0]).peak < program.timelines(best).peak
    again, _ = decided(undecided.formulation.table, after)
    second = [first_run(op.name) for op in again.graph.ops if op.name not in plain.table.graph.by_name]
    assert second and all(after[name] == after[f"{name}_again"] for name in second), "a recomputed op has the placements of the first one"
