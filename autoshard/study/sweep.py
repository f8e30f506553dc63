"""The trade of memory against time: the best plan found for each of several budgets."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from autoshard.base.plan import Plan
from autoshard.base.worth import gib_seconds
from autoshard.decide.options import Options
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.decide.program import Program
from autoshard.errors import InfeasibleError, Interrupted
from autoshard.planner.one_stage import decide, program_of
from autoshard.search.problem import Solution
from autoshard.space.cost_table import CostTable

UNLIMITED = 1e18


@dataclass(frozen=True)
class Point:
    """A budget in bytes per rank, with the plan found for it, or why there is none. `gib_s`: seconds of a step that a GiB is worth between this
    budget and the next smaller one; None where nothing fits there."""

    budget: float
    plan: Plan | None
    why: str = ""
    proven: bool = False  # that there is none
    gib_s: float | None = None

    @property
    def split(self) -> float:
        """Share of the parameters that are stored split, by count."""
        weights = [x.spec for x in self.plan.layouts if x.kind == "weight"] if self.plan else []
        return sum(any(p >= 0 for p in s) for s in weights) / max(1, len(weights))

    def to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"budget_bytes": self.budget, "fits": self.plan is not None, "why": self.why}
        if self.plan is not None:
            p = self.plan
            out |= {"step_s": p.objective_s, "peak_bytes": p.memory["total"], "gap": p.gap, "status": p.status, "seconds_per_gib": self.gib_s,
                    "stored_split": self.split, "memory": {k: v for k, v in p.memory.items() if k not in ("total", "limit")}}
        return out


def sweep(table: CostTable, options: Options, budgets: Sequence[float] = (), *, steps: int = 6, has_loss: bool = False,
          model: Mapping[str, Any] | None = None, say: Callable[[str], None] = lambda text: None,
          clock: PhaseTimer | None = None) -> tuple[Point, ...]:
    """Plans from the largest budget to the smallest. Without `budgets`: from what the fastest plan takes down to an eighth
    of it, in `steps` equal ratios. Ctrl-C ends it with the budgets so far. A plan for a smaller budget that is faster
    stands for the larger one too. Raises InfeasibleError where seeds leave no plan at all."""
    clock = clock or PhaseTimer()
    search = _Search(table, options, has_loss, model, clock)
    if not budgets:
        say("the fastest plan")
        ample = search.point(UNLIMITED)
        if ample.plan is None:
            raise InfeasibleError(ample.why)
        if clock.ended.is_set():
            return (replace(ample, budget=float(ample.plan.memory["total"])),)
        budgets = np.geomspace(float(ample.plan.memory["total"]), float(ample.plan.memory["total"]) / 8, steps).tolist()
    points: list[Point] = []
    for budget in sorted(budgets, reverse=True):
        say(f"budget {budget:.4g} bytes")
        try:
            points.append(search.point(budget))
        except Interrupted:
            if not points:
                raise
            break
        if clock.ended.is_set():
            break
        if points[-1].plan is None and points[-1].proven:
            break  # a smaller one fits even less
    return _priced([_best(p, points) for p in points])


@dataclass
class _Search:
    """Plans of one program within different budgets; what one of them found out, the next one need not."""

    table: CostTable
    options: Options
    has_loss: bool
    model: Mapping[str, Any] | None
    clock: PhaseTimer
    known: dict[str, Solution] = field(default_factory=dict)

    @cached_property
    def program(self) -> Program:
        return program_of(self.table, self.options, has_loss=self.has_loss)

    def point(self, budget: float) -> Point:
        options = replace(self.options, memory_budget=budget)
        try:
            return Point(budget, decide(self.table, options, has_loss=self.has_loss, model_info=self.model, clock=self.clock, known=self.known,
                                        program=self.program))
        except InfeasibleError as e:
            return Point(budget, None, str(e), e.proven)


def _priced(points: Sequence[Point]) -> tuple[Point, ...]:
    """Points from the largest budget to the smallest, each with what a GiB is worth down to the next."""
    out = list(points)
    for i, (more, less) in enumerate(zip(points, points[1:], strict=False)):
        if more.plan is not None and less.plan is not None:
            out[i] = replace(more, gib_s=gib_seconds(less.plan.objective_s, more.plan.objective_s, more.budget - less.budget))
    return tuple(out)


def _best(point: Point, points: Sequence[Point]) -> Point:
    """What fits a smaller budget fits this one."""
    fitting = [p.plan for p in points if p.plan is not None and p.budget <= point.budget]
    return replace(point, plan=min(fitting, key=lambda p: p.objective_s), why="") if fitting else point
