"""The plan of least memory that the search finds. Its peak is a budget that is known to be enough."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autoshard.decide.how import How
from autoshard.decide.memory.fit import search_within
from autoshard.decide.memory.memory_problems import ample, least_memory, memory_priced, possible, rows_of
from autoshard.decide.program import Program
from autoshard.formulate.memory_rows import with_row
from autoshard.formulate.problem_of import Formulation
from autoshard.play.timeline import Timeline
from autoshard.search.problem import evaluate, row_loads

ROUNDS = 6
DEAR = 1000.0  # steps that all memory together costs: a thousandth of it is worth one
LESS = 0.97  # of what the plan found needs: worth another search
MOST_PLAYED = 6

Lean = tuple[np.ndarray, Timeline]
"""A choice, and its memory."""


def leanest(program: Program, how: How) -> Lean | None:
    """The choice of least peak found in the time left; None where no choice was found at all."""
    found = _priced(program, how.part(0.5))
    while found is not None and not how.clock.expired():
        less = _within(program, LESS * found[1].peak, how.part(0.5))
        if less is None:
            break
        found = less
    return found


def _priced(program: Program, how: How) -> Lean | None:
    """Minimise memory: first at the moments that have rows, then also at the peak of the plan found. Seconds have a small weight:
    of plans with equal rows, the faster one splits tensors that the rows do not count."""
    formulation, met = program.formulation, possible(program.formulation.problem, program.starts)
    played = [(choice, program.timelines(choice)) for choice in met[:MOST_PLAYED]]
    for n in range(ROUNDS):
        choice = _least(formulation, met, how.part(1 / (ROUNDS - n)))
        if choice is None:
            break
        met.append(choice)
        played.append((choice, program.timelines(choice)))
        moment = played[-1][1].moment_of(played[-1][1].peak_time)
        if moment in formulation.memory_rows or how.clock.expired():
            break
        formulation = with_row(formulation, moment)
    return min(played, key=lambda lean: lean[1].peak, default=None)


def _least(formulation: Formulation, met: Sequence[np.ndarray], how: How) -> np.ndarray | None:
    """The choice of least memory in the rows, or the best one with repeated layers tied."""
    problem, rows = formulation.problem, rows_of(formulation)
    start = met[-1] if met else how.part(0.5).solve(least_memory(problem, rows)).choice
    if start is None:
        return None
    price = DEAR * evaluate(ample(problem), start) / max(row_loads(problem, start)[rows].max(), 1.0)
    return how.solve_until_tied(memory_priced(problem, rows, price), (*met, start), lambda choice: True).choice


def _within(program: Program, peak: float, how: How) -> Lean | None:
    """A choice of at most this peak, in bytes."""
    formulation = program.formulation
    budget, limits = formulation.budget.of_peak(peak), formulation.problem.row_limit.copy()
    limits[rows_of(formulation)] = budget.peak
    lower = replace(formulation, problem=replace(formulation.problem, row_limit=limits), budget=budget)
    found = search_within(replace(program, formulation=lower, starts=()), how)
    return None if found.choice is None else (found.choice, program.timelines(found.choice))
