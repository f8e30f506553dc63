"""A small problem whose rows hardly matter, solved without reducing it first: messages on its tables as they are given prove a bound, often in
tenths of a second, and the strategies that a choice may take which costs little more than that are few enough to be solved exactly.

Rows are left out. Where the optimum without them loads none of them too much, or where what excess costs is little, it is the optimum."""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from autoshard.search.board import MARGIN, Board
from autoshard.search.problem import Problem
from autoshard.search.routes.min_sum import minimise

if TYPE_CHECKING:
    from autoshard.search.dual.factored import Sweeps

FEW, MANY, MIDDLING = 1_000, 60_000, 100_000  # strategies of all nodes; below, what is left of the problem is a small MIP; above the second, messages
# take longer than other routes, and above the third so do answers at prices of rows (at_prices.py)
SWEEPS, FLAT = 20, 3  # sweeps at a time, and how many times in a row they may gain little:
GAIN, SLOW = 1e-5, 0.02  # of the bound, and of what the best choice is above it
FAR, NEAR = 0.1, 1e-2  # of the bound: the best choice is so much above it where the bound is too loose; and where all that is cheaper may be searched
GUESS = 1e-5  # of the bound, by which the optimum is assumed to be above it: what is found then is near the optimum at least


def is_small(problem: Problem) -> bool:
    """Whether `search_as_given` takes less time than it is likely to save."""
    return _size_is_within(problem, MANY)


def is_middling(problem: Problem) -> bool:
    """The same of `search_at_prices`."""
    return _size_is_within(problem, MIDDLING)


def _size_is_within(problem: Problem, most: int) -> bool:
    return problem.intervals is None and FEW <= int(problem.flat_nodes.size.sum()) <= most


def search_as_given(board: Board) -> None:
    """Offer the optimum to `board` and prove it, or give up soon; what is proven by then is its bound."""
    from autoshard.search.dual.factored import Sweeps  # loads the compiled sweeps

    free = Problem(board.problem.node_costs, board.problem.edges)
    sweeps = Sweeps(free)
    _settle(board, sweeps)
    if board.choice is None or board.cost <= sweeps.bound + FAR * abs(sweeps.bound):
        _search_within(board, free, sweeps, GUESS * abs(sweeps.bound))
        _settle(board, sweeps)
    if board.cost <= sweeps.bound + NEAR * abs(sweeps.bound):
        _search_within(board, free, sweeps, board.cost - sweeps.bound)
    if board.choice is not None and board.proven:
        board.near = [*board.near, board.choice]


def _search_within(board: Board, free: Problem, sweeps: Sweeps, room: float) -> None:
    """The best choice that costs at most so much more than what is proven, if there is one."""
    if board.done or not np.isfinite(sweeps.bound):
        return
    found = minimise(_only(free, sweeps.possible(room)), clock=board.clock)
    board.raise_bound(min(sweeps.bound + room, found.bound), "few strategies left")
    if found.choice is not None:
        board.offer(found.choice, "few strategies left")


def _settle(board: Board, sweeps: Sweeps) -> None:
    """Sweep until a choice costs what is proven, or little more is proven than before."""
    flat = 0
    while flat < FLAT and not board.done:
        before = sweeps.bound
        sweeps.run(SWEEPS)
        board.clock.work += SWEEPS
        board.raise_bound(sweeps.bound, "messages")
        gap = board.cost - sweeps.bound if board.choice is not None else 0.0
        flat = flat + 1 if sweeps.bound <= before + max(GAIN * abs(before), SLOW * gap) else 0
        choice = sweeps.choice()
        if sweeps.cost(choice) <= sweeps.bound + MARGIN * abs(sweeps.bound):
            board.offer(choice, "messages")
            return


def _only(free: Problem, possible: Sequence[np.ndarray]) -> Problem:
    """The problem with no strategies but these."""
    made: dict[tuple[int, bytes], np.ndarray] = {}

    def cost(of: np.ndarray, kept: np.ndarray) -> np.ndarray:
        key = id(of), kept.tobytes()
        if key not in made:
            made[key] = np.full(len(of), np.inf)
            made[key][kept] = of[kept]
        return made[key]

    return Problem(tuple(cost(of, kept) for of, kept in zip(free.node_costs, possible, strict=True)), free.edges)
