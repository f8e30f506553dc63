"""Searches of strategies near known layouts, then of those near what was found, while that makes steps shorter.

Each is solved like any program, so its result is the best of what is near. What was found is a start of the next one."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.base.plan import AROUND, NEARBY, OpPlan, Plan
from autoshard.decide.backends import Found
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.decide.walks.lift import Layouts
from autoshard.errors import InfeasibleError
from autoshard.planner.many_axes import Coarse, near
from autoshard.space.cost_table import CostTable

LEAST = 1.0
"""Seconds at least for a search near known layouts."""
WORTH = 5e-3
"""Share of a step by which it has to be shorter for another search to be worth its time."""
CLOSE = 1e-3
"""Of the bound, within which a plan is good enough."""
ONE, TWO = 1, 2
"""Axes on which strategies may differ: from layouts that may be changed often, and from those of a plan."""
SHARE = 0.5
"""Of the time left, for one search of many."""


class Left:
    """Seconds that searches may still take, at least `LEAST`."""

    def __init__(self, clock: PhaseTimer, limit: float) -> None:
        self._clock, self._end = clock, clock.seconds.get("search", 0.0) + limit

    @property
    def seconds(self) -> float:
        return max(LEAST, self._end - self._clock.seconds.get("search", 0.0))

    @property
    def over(self) -> bool:
        return self.seconds <= LEAST


@dataclass(eq=False)
class Descent:
    """`bound`: of all plans of `table`, in seconds. `search(table, seconds, starts)` finds the best of the strategies of a table; `say` hears of it.
    `stopped`: whether the user has ended the search, after which there is one more within `LEAST` at most."""

    table: CostTable
    bound: float
    search: Callable[[CostTable, float, Sequence[Plan | Layouts]], Found]
    left: Left
    say: Callable[[str, str], None]
    stopped: bool = False

    def from_layouts(self, ops: Mapping[str, OpPlan], far: float = np.inf) -> Found | None:
        """The best of what is near them, step by step while it is within `far` of the bound; None where nothing near them fits, and where there
        are none."""
        if not ops:
            return None
        self.say("axes", f"strategies that differ from layouts close to that bound on one axis of {self.table.mesh}")
        try:
            found = self._down(Layouts(ops, self.table.graph.hash, self.table.mesh), np.inf, self._same, ONE, SHARE, far)
        except InfeasibleError:
            return None
        return replace(found, status=f"{found.status}{AROUND}")

    def from_plan(self, plan: Plan, coarse: Coarse) -> Found:
        """The same from a plan for fewer axes, which is a plan here too. Raises InfeasibleError."""
        self.stopped |= plan.interrupted
        self.say("axes", f"{plan.objective_s:.6g} s on mesh {plan.spec_mesh}; now strategies near that plan on {self.table.mesh}")
        found = self._down(plan, plan.objective_s, coarse.parts, TWO, 1.0)
        return replace(found, status=f"{found.status}{NEARBY}{coarse.mesh}")

    @property
    def _same(self) -> tuple[int, ...]:
        return tuple(range(self.table.mesh.ndim))

    def _down(self, start: Plan | Layouts, before: float, parts: Sequence[int], most: int, share: float,
              far: float = np.inf) -> Found:
        best: Found | None = None
        while True:
            found = self.search(near(self.table, parts, start.ops, most), LEAST if self.stopped else share * self.left.seconds, (start,))
            best = found if best is None or found.solution.cost < best.solution.cost else best
            plan = found.plan(self.table, {}, {})
            self.stopped |= plan.interrupted
            done = self.stopped or self.left.over or plan.objective_s <= (1.0 + CLOSE) * self.bound
            if done or plan.objective_s > (1.0 + far) * self.bound or plan.objective_s >= (1.0 - WORTH) * before:
                return best
            self.say("axes", f"{plan.objective_s:.6g} s; now strategies near that plan")
            start, before, parts = plan, plan.objective_s, self._same
