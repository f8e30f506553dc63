"""Search: one strategy per node at least total cost, within the rows' limits, always with a valid bound.

    solve(problem) -> Solution

`BACKENDS` is the registry: a backend is a function of a `Board` (problem, clock, best so far) and options.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from autoshard.errors import ProblemError
from autoshard.search.board import Board, Progress
from autoshard.search.clock import Clock
from autoshard.search.heap import settled_heap
from autoshard.search.problem import Edge, Intervals, Items, Problem, Solution, Status, evaluate
from autoshard.search.routes.auto import search_auto, search_local, search_mip
from autoshard.search.routes.brute import search_brute

if TYPE_CHECKING:
    from autoshard.search.routes.neighbourhoods import Neighbourhoods

__all__ = ["BACKENDS", "Board", "Clock", "Edge", "Intervals", "Items", "Problem", "Solution", "Status", "evaluate", "improve", "mix",
           "neighbourhoods_of", "prove", "solve"]

BACKENDS: dict[str, Callable[..., None]] = {
    "auto": search_auto,
    "milp": lambda board, seed, threads: search_mip(board, seed=seed),
    "cp_sat": lambda board, seed, threads: search_mip(board, solver="cp_sat", seed=seed),
    "local": search_local,
    "brute": lambda board, seed, threads: search_brute(board),
}


def improve(problem: Problem, start: np.ndarray, clock: Clock, progress: Progress | None = None,
            wide: bool = False, known: Neighbourhoods | None = None) -> tuple[np.ndarray, float] | None:
    """`start` made cheaper, neighbourhood by neighbourhood, until none is cheaper or `clock` is over; with its cost. There is no bound.
    None where `start` is not feasible. `wide`: neighbourhoods of more nodes, which take longer. `known`: `neighbourhoods_of(problem)`, for calls
    that share what they compute. Raises ProblemError for a malformed problem."""
    from autoshard.search.routes import neighbourhoods  # loads what only this needs

    nodes = neighbourhoods.WIDE if wide else neighbourhoods.NODES
    return _from([start], Board(problem, clock, progress), lambda board: neighbourhoods.improve(board, nodes, known))


def prove(problem: Problem, start: np.ndarray, clock: Clock, progress: Progress | None = None, enough: float = 0.0) -> Solution:
    """What is soon known of a small problem: the optimum, or that `start` is within the relative gap `enough` of it, or little. Nothing is known of a
    large one. Raises ProblemError for a malformed problem."""
    from autoshard.search.routes.as_given import is_small, search_as_given  # loads what only this needs

    board = Board(problem, clock, progress, enough=enough)
    board.offer(np.asarray(start), "incumbent")
    if is_small(problem):
        with settled_heap():
            search_as_given(board)
    return board.solution()


def neighbourhoods_of(problem: Problem) -> Neighbourhoods:
    """What several calls of `improve` for one problem share."""
    from autoshard.search.routes import neighbourhoods  # loads what only this needs

    return neighbourhoods.Neighbourhoods(problem)


def mix(problem: Problem, choices: Sequence[np.ndarray], clock: Clock, progress: Progress | None = None) -> tuple[np.ndarray, float] | None:
    """The cheapest mixture of `choices`, in which every node does what it does in one of them, with its cost. There is no bound. It is the
    cheapest of them where that is not found in time, and None where none is feasible. Raises ProblemError for a malformed problem."""
    from autoshard.search.routes.mixture import mix as mix_on  # loads what only this needs

    return _from(choices, Board(problem, clock, progress), lambda board: mix_on(board, choices))


def _from(known: Sequence[np.ndarray], board: Board, route: Callable[[Board], None]) -> tuple[np.ndarray, float] | None:
    """What a route without a bound makes of known choices."""
    for choice in known:
        board.offer(np.asarray(choice), "incumbent")
    if board.choice is None:
        return None
    with settled_heap():
        route(board)
    return board.choice, board.cost


def solve(problem: Problem, *, backend: str = "auto", time_limit: float = 60.0, work_limit: int | None = None,
          threads: int = 2, seed: int = 0, starts: Sequence[np.ndarray] = (), progress: Progress | None = None,
          board: Board | None = None, clock: Clock | None = None, near: Sequence[np.ndarray] = (), enough: float = 0.0) -> Solution:
    """Minimise `problem`. `time_limit` in seconds of wall clock, or a `clock` (a part of another's, say);
    `work_limit` in search steps, for runs that must repeat exactly; `starts` are choices to start from;
    `progress` is called with an `Event` on every improvement. `near`: choices of a problem that differs in its rows' limits
    (`Solution.near`), from which prices of the rows are guessed. `board` lets another thread watch the best choice and stop the
    search; it has a clock, a progress and `near` of its own. `enough`: the relative gap at which the search may end.

    Raises ProblemError for a malformed problem or an unknown backend. A problem with no feasible choice is not an
    error: its status is `Status.INFEASIBLE`."""
    if backend not in BACKENDS:
        raise ProblemError(f"no search backend {backend!r}; there are {', '.join(sorted(BACKENDS))}")
    board = board or Board(problem, clock or Clock(time_limit, work_limit), progress, near, enough)
    for choice in starts:
        board.offer(np.asarray(choice), "incumbent")
    with settled_heap():
        BACKENDS[backend](board, seed=seed, threads=threads)
        if board.proven and board.integral and backend != "brute":
            from autoshard.search.dual.proof import confirm  # loads the compiled sweeps

            if confirm(board):
                board.confirmed()
            board.stats["exact"] = board.exact
    return board.solution()
