"""The limits of one solve: seconds, a deterministic amount of work, and a request to stop."""
from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Clock:
    """`time_limit` in seconds from `start`; `work_limit` in steps (a MIP node, a local-search move), None = no limit."""

    time_limit: float
    work_limit: int | None = None
    start: float = field(default_factory=time.monotonic)
    stop: bool = False  # set from a signal handler or another thread
    work: int = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    @property
    def left(self) -> float:
        return 0.0 if self.stop else max(0.0, self.time_limit - self.seconds)

    @property
    def out_of_work(self) -> bool:
        return self.work_limit is not None and self.work >= self.work_limit

    def expired(self) -> bool:
        return self.stop or self.out_of_work or self.seconds >= self.time_limit
