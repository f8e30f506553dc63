"""The limits of one solve: seconds, a deterministic amount of work, and a request to stop."""
from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

LATE = 0.05  # of the whole time limit, after which nobody waits for a solver any more


@dataclass
class Clock:
    """`time_limit` in seconds from `start`, as `now` counts them; `work_limit` in steps (a MIP node, a local-search move), None =
    no limit. `whole`: the clock that this one is a part of; what stops that one stops this one."""

    time_limit: float
    work_limit: int | None = None
    start: float = math.nan  # nan: it starts now
    stop: bool = False  # set from a signal handler or another thread
    work: int = 0
    cut: bool = False  # a share of the time ran out somewhere: a faster machine may find another choice
    now: Callable[[], float] = time.monotonic
    whole: Clock | None = None

    def __post_init__(self) -> None:
        if math.isnan(self.start):
            self.start = self.now()

    @property
    def seconds(self) -> float:
        return self.now() - self.start

    @property
    def stopped(self) -> bool:
        """Whether somebody asked this clock, or one it is a part of, to stop."""
        return self.stop or (self.whole is not None and self.whole.stopped)

    @property
    def left(self) -> float:
        return 0.0 if self.stopped else max(0.0, self.time_limit - self.seconds)

    def part(self, share: float = 1.0, work_limit: int | None = None) -> Clock:
        """A clock of its own for a share of what is left."""
        return Clock(share * self.left, work_limit, now=self.now, whole=self)

    def overdue(self) -> bool:
        """Whether even a solver that cannot look at its clock must end: a stop was asked for, or the time limit of the whole passed."""
        if self.whole is not None:
            return self.stop or self.whole.overdue()
        return self.stop or self.seconds > (1 + LATE) * self.time_limit

    @property
    def out_of_work(self) -> bool:
        return self.work_limit is not None and self.work >= self.work_limit

    def expired(self) -> bool:
        return self.stopped or self.out_of_work or self.seconds >= self.time_limit


class Pace(Protocol):
    """What says how long something goes on: it is told of work, and asked."""

    def tick(self, work: int) -> None:
        """So much was done."""

    def over(self) -> bool:
        """Whether to stop."""
        ...


class Phase:
    """A share of what is left of a clock, for one worker. Under a work limit only work counts, so that runs repeat."""

    def __init__(self, clock: Clock, share: float, workers: int = 1):
        self.clock, self.work = clock, 0
        self.begin, self.length = clock.seconds, max(1e-9, share * clock.left)
        self.budget = None
        if clock.work_limit is not None:
            self.budget = max(1, int(share * (clock.work_limit - clock.work) / workers))

    def tick(self, work: int) -> None:
        self.work += work

    @property
    def fraction(self) -> float:
        """How much of this phase has passed, from 0 to 1."""
        passed = (self.clock.seconds - self.begin) / self.length if self.budget is None else self.work / self.budget
        return min(1.0, passed)

    def over(self) -> bool:
        passed = self.fraction >= 1.0
        self.clock.cut |= passed and self.budget is None
        return self.clock.stopped or passed or self.clock.seconds >= self.clock.time_limit
