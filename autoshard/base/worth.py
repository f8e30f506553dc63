"""What memory is worth to a plan: seconds of a step that more of it would save, or less of it cost."""
from __future__ import annotations

from dataclasses import dataclass

from autoshard.base.typed_data import Number

GIB = 2**30
SAME = 1e-9
"""Relative difference of seconds that are one number."""


def gib_seconds(less_s: float, more_s: float, apart: float) -> float:
    """Seconds of a step that a GiB is worth, by those of plans within budgets that are `apart` bytes apart."""
    return (less_s - more_s) / apart * GIB


@dataclass(frozen=True)
class Neighbour:
    """The best plan found within another budget (bytes per rank). `step_s` None: none was found, or none exists, as `why` says.
    `bound_s`: no plan within it is faster."""

    budget: Number
    step_s: Number | None
    bound_s: Number = 0.0
    why: str = ""


@dataclass(frozen=True)
class MemoryWorth:
    """`ample_s`: no plan is faster, whatever the memory; 0 where that is not known. `less`, `more`: plans within budgets around the plan's own,
    where they were asked for (`autoshard plan --worth`)."""

    ample_s: Number = 0.0
    less: Neighbour | None = None
    more: Neighbour | None = None

    def binds(self, objective_s: float) -> bool:
        """Whether more memory may make a step of so many seconds faster."""
        return objective_s > self.ample_s * (1.0 + SAME)

    @property
    def gib_s(self) -> float | None:
        """Seconds of a step that a GiB is worth: the difference of the plans around, over that of their budgets. None where one is missing."""
        if self.less is None or self.more is None or self.less.step_s is None or self.more.step_s is None:
            return None
        return gib_seconds(self.less.step_s, self.more.step_s, self.more.budget - self.less.budget)
