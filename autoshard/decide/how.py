"""How to search: for how long, with which backend, and who is told."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from autoshard.search import Clock, improve, mix, prove, solve
from autoshard.search.board import Board, Event, Progress
from autoshard.search.problem import Problem, Seen, Solution, Status

if TYPE_CHECKING:
    from autoshard.search.routes.neighbourhoods import Neighbourhoods

ENDED = frozenset({Status.OPTIMAL, Status.OPTIMAL_TIED, Status.GAP})
"""Of searches that no limit ended."""


@dataclass(frozen=True, eq=False)
class How:
    """`clock` ends the search, `backend` is one of `search.BACKENDS`, `progress` hears of every improvement. `finer`: whether the plan over
    decision units is refined op by op. `enough`: the relative gap at which a search ends. `known`: solutions of problems that were
    searched to their end, or to the best tied choice where that was enough, by what they say (`Problem.key`): stages of equal blocks are problems
    with equal numbers, and so is one program with ample memory, whatever the budget; in little memory limits corrected by a plan come again.
    `proves`: whether a bound is asked for, or only a choice."""

    clock: Clock
    backend: str = "auto"
    progress: Progress | None = None
    finer: bool = True
    enough: float = 0.0
    known: dict[str, Solution] | None = None
    proves: bool = True

    def part(self, share: float = 1.0, enough: float = 0.0) -> How:
        """The same for a share of the time left, which ends at a relative gap of `enough` at the latest."""
        return replace(self, clock=self.clock.part(share), enough=max(self.enough, enough))

    def solve(self, problem: Problem, starts: Sequence[np.ndarray] = (), near: Sequence[np.ndarray] = ()) -> Solution:
        """Minimise `problem`. `starts`, `near`: as `starts` and `near` of `search.solve`."""
        return self._remembered(problem, lambda: solve(problem, backend=self.backend, clock=self.clock, progress=self.progress, starts=starts,
                                                       near=near, enough=self.enough))

    def improve(self, problem: Problem, start: np.ndarray, wide: bool, known: Neighbourhoods) -> tuple[np.ndarray, float] | None:
        """A choice at most as dear as `start`, by `search.improve`, with its cost; None where `start` is not feasible. `known`: of the problem."""
        return improve(problem, start, self.clock.part(), self.progress, wide, known)

    def prove(self, problem: Problem, start: np.ndarray, enough: float) -> Solution:
        """What `search.prove` says of a choice."""
        return prove(problem, start, self.clock.part(), self.progress, enough)

    def mix(self, problem: Problem, choices: Sequence[np.ndarray]) -> tuple[np.ndarray, float] | None:
        """The cheapest mixture of choices, by `search.mix`, with its cost; None where none is feasible."""
        return mix(problem, choices, self.clock.part(), self.progress)

    def solve_until_tied(self, problem: Problem, starts: Sequence[np.ndarray], enough: Callable[[np.ndarray], bool],
                         near: Sequence[np.ndarray] = (), worth_all: Callable[[np.ndarray], bool] = lambda choice: False,
                         seen: Sequence[Seen] = ()) -> Solution:
        """`solve`, ended by the first choice that is the best one with repeated layers tied, where it is `enough`. While the best choice is
        `worth_all`, all the time is for this search that is left of the clock which this one is a part of."""
        ended = None if self.known is None else self.known.get(f"{problem.key} tied")
        if ended is not None and ended.choice is not None and enough(ended.choice):
            return ended
        def watch(event: Event) -> None:
            if self.progress is not None:
                self.progress(event)
            if event.tied and enough(board.choice):
                board.clock.stop = True
            if board.choice is not None and all_left is not None:
                board.clock.time_limit = board.clock.seconds + all_left.left if worth_all(board.choice) else limit

        board = Board(problem, self.clock.part(), watch, near, self.enough, seen)
        all_left, limit = self.clock.whole, board.clock.time_limit
        found = self._remembered(problem, lambda: solve(problem, backend=self.backend, board=board, starts=starts))
        if self.known is not None and board.clock.stop:
            self.known[f"{problem.key} tied"] = found
        return found

    def _remembered(self, problem: Problem, search: Callable[[], Solution]) -> Solution:
        """What is known of the problem, as near its optimum as asked; else what `search` finds, which is kept where no limit ended the search."""
        if self.known is None:
            return search()
        key = problem.key
        found = self.known.get(key)
        if found is None or found.status is Status.GAP and found.gap > self.enough:
            found = search()
            if found.status in ENDED:
                self.known[key] = found
        return found
