"""The plan of least memory that the search finds. Its peak is a budget that is known to be enough."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autoshard.decide.fit import Asked, ample, least_memory, memory_priced, possible, search_within
from autoshard.formulate.memory_rows import with_row
from autoshard.formulate.problem_of import Formulation, buffer_bytes
from autoshard.play.timeline import Timeline
from autoshard.search import Board, Clock, solve
from autoshard.search.board import TIED
from autoshard.search.problem import evaluate, row_loads

ROUNDS = 6
DEAR = 1000.0  # steps that all memory together costs: a thousandth of it is worth one
LESS = 0.97  # of what the plan found needs: worth another search
MOST_PLAYED = 6

Lean = tuple[np.ndarray, Timeline]
"""A choice, and its memory."""


def leanest(asked: Asked, clock: Clock) -> Lean | None:
    """The choice of least peak found in what is left of `clock`; None where no choice was found at all."""
    found = _priced(asked, clock.part(0.5))
    while found is not None and not clock.expired():
        less = _within(asked, LESS * found[1].peak, clock.part(0.5))
        if less is None:
            break
        found = less
    return found


def _priced(asked: Asked, clock: Clock) -> Lean | None:
    """Minimise memory: first at the moments that have rows, then also at the peak of the plan found. Seconds have a small weight:
    of plans with equal rows, the faster one splits tensors that the rows do not count."""
    formulation, met = asked.formulation, possible(asked.formulation.problem, asked.known)
    played = [(choice, asked.played(choice)) for choice in met[:MOST_PLAYED]]
    for n in range(ROUNDS):
        choice = _least(formulation, met, clock.part(1 / (ROUNDS - n)))
        if choice is None:
            break
        met.append(choice)
        played.append((choice, asked.played(choice)))
        moment = played[-1][1].moment_of(played[-1][1].peak_time)
        if moment in formulation.memory_rows or clock.expired():
            break
        formulation = with_row(formulation, moment)
    return min(played, key=lambda lean: lean[1].peak, default=None)


def _least(formulation: Formulation, met: Sequence[np.ndarray], clock: Clock) -> np.ndarray | None:
    """The choice of least memory in the rows, or the best one with repeated layers tied."""
    problem, rows = formulation.problem, np.array(list(formulation.memory_rows.values()))
    start = met[-1] if met else solve(least_memory(problem, rows), clock=clock.part(0.5)).choice
    if start is None:
        return None
    price = DEAR * evaluate(ample(problem), start) / max(row_loads(problem, start)[rows].max(), 1.0)

    def watch(*facts: Any) -> None:
        board.clock.stop |= facts[-1] == TIED

    board = Board(memory_priced(problem, rows, price), clock.part(), watch)
    return solve(board.problem, board=board, incumbents=(*met, start)).choice


def _within(asked: Asked, peak: float, clock: Clock) -> Lean | None:
    """A choice of at most this peak, in bytes."""
    formulation = asked.formulation
    table, limits = formulation.table, formulation.problem.row_limit.copy()
    limits[list(formulation.memory_rows.values())] = peak - buffer_bytes(table)
    lower = replace(formulation, problem=replace(formulation.problem, row_limit=limits))
    limit = peak * (1.0 + table.cluster.device.allocator_slack)
    found = search_within(lower, limit, measure=asked.played, clock=clock, incumbents=())
    return None if found.choice is None else (found.choice, asked.played(found.choice))
