"""What one solve has found so far: the best choice, with its cost evaluated on the problem itself, and the best bound."""
from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.search.clock import Clock
from autoshard.search.problem import Problem, Seen, Solution, Status, evaluate

MARGIN = 1e-9  # relative: costs and bounds closer than this are called equal, well above the rounding of the sums



@dataclass(frozen=True)
class Event:
    """News of a search: the best cost, the bound, their relative gap, and the seconds since the search began. `message`: what brought
    it, for people. `tied`: the choice is the best one that treats repeated layers alike."""

    cost: float
    bound: float
    gap: float
    seconds: float
    message: str = ""
    tied: bool = False


Progress = Callable[[Event], None]


class Board:
    """Every route offers choices and raises bounds here; nothing is believed before `evaluate` has seen it."""

    def __init__(self, problem: Problem, clock: Clock, progress: Progress | None = None, near: Sequence[np.ndarray] = (), enough: float = 0.0,
                 seen: Sequence[Seen] = ()):
        self.problem, self.clock, self.progress = problem, clock, progress
        self.enough = enough  # the relative gap at which whoever asked wants no more
        self.lock = threading.RLock()  # walkers offer from their threads, and a signal may want the answer at any moment
        self.choice: np.ndarray | None = None
        self.cost, self.bound = math.inf, -math.inf
        self.infeasible = False
        self.tied_proven = False  # the choice is proven optimal among those that treat repeated layers alike
        self.exact = False  # the choice is proven optimal without any rounding
        self.stats: dict[str, Any] = {}
        self.near: list[np.ndarray] = list(near)  # choices for prices of the rows to start from, then those met at prices
        self.seen = tuple(seen)  # choices of a problem of fewer strategies, for the same
        self.integral = _is_integral(problem)

    def offer(self, choice: np.ndarray, message: str = "", tied: bool = False) -> float:
        """Keep `choice` (for every node of the problem) if it is the best feasible one; returns its cost. `tied`: see `Event`; it is told also of a
        choice that is known."""
        cost = evaluate(self.problem, choice)
        with self.lock:
            if cost < self.cost:
                self.tied_proven &= cost >= self.cost - MARGIN * abs(self.cost)  # cheaper than all tied ones: not tied itself
                self.choice, self.cost = np.array(choice, dtype=np.int64), cost
                self.report(message, tied)
            elif tied and cost == self.cost < math.inf:
                self.report(message, tied)
        return cost

    def raise_bound(self, bound: float, message: str = "") -> None:
        """`bound` must be valid up to `MARGIN`. Integer problems round it up."""
        if self.integral and math.isfinite(bound):
            bound = float(math.ceil(bound - MARGIN * max(1.0, abs(bound))))
        with self.lock:
            if bound > self.bound:
                self.bound = bound
                self.report(message)

    @property
    def gap(self) -> float:
        if self.choice is None:
            return math.inf
        return max(0.0, self.cost - self.bound) / max(abs(self.cost), 1e-30)

    @property
    def proven(self) -> bool:
        return self.choice is not None and self.cost - self.bound <= MARGIN * abs(self.cost)

    @property
    def done(self) -> bool:
        return self.proven or self.infeasible or self.gap <= self.enough or self.clock.expired()

    def confirmed(self) -> None:
        """The choice was proven optimal in whole numbers."""
        self.exact, self.bound = True, self.cost
        self.report("proven in whole numbers")

    def report(self, message: str, tied: bool = False) -> None:
        if self.progress is not None:
            self.progress(Event(self.cost, min(self.bound, self.cost), self.gap, self.clock.seconds, message, tied))

    def solution(self) -> Solution:
        with self.lock:
            bound = self.cost if self.proven else min(self.bound, self.cost)
            if self.infeasible and self.choice is None:
                bound = math.inf
            return Solution(self.choice, self.cost, bound, self._status(), self.clock.seconds, self.stats, tuple(self.near))

    def _status(self) -> Status:
        if self.proven:
            return Status.OPTIMAL
        if self.choice is None:
            return Status.INFEASIBLE if self.infeasible else Status.UNKNOWN
        if self.clock.stopped:
            return Status.INTERRUPTED
        if self.tied_proven:
            return Status.OPTIMAL_TIED
        if self.clock.out_of_work:
            return Status.WORK_LIMIT
        return Status.TIME_LIMIT if self.clock.expired() or self.clock.cut else Status.GAP


def _is_integral(problem: Problem) -> bool:
    """Whether all finite costs are whole numbers (and no priced row makes fractions of them)."""
    if np.isfinite(problem.row_price).any():
        return False
    seen: dict[int, np.ndarray] = {id(a): a for a in (*problem.node_costs, *(e.table for e in problem.edges))}
    return all(np.array_equal(a, np.rint(a)) for a in seen.values())
