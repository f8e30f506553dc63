"""The limits of one solve: seconds, a deterministic amount of work, and a request to stop."""
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Clock:
    """`time_limit` in seconds from `start`, as `now` counts them; `work_limit` in steps (a MIP node, a local-search move), None =
    no limit."""

    time_limit: float
    work_limit: int | None = None
    start: float | None = None
    stop: bool = False  # set from a signal handler or another thread
    work: int = 0
    cut: bool = False  # a share of the time ran out somewhere: a faster machine may find another choice
    now: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        if self.start is None:
            self.start = self.now()

    @property
    def seconds(self) -> float:
        return self.now() - self.start

    @property
    def left(self) -> float:
        return 0.0 if self.stop else max(0.0, self.time_limit - self.seconds)

    @property
    def out_of_work(self) -> bool:
        return self.work_limit is not None and self.work >= self.work_limit

    def expired(self) -> bool:
        return self.stop or self.out_of_work or self.seconds >= self.time_limit


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
        return self.clock.stop or passed or self.clock.seconds >= self.clock.time_limit
