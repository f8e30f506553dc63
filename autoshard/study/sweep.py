"""The trade of memory against time: the best plan found for each of several budgets."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoshard.base.plan import Plan
from autoshard.decide.options import Options
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.errors import InfeasibleError, Interrupted
from autoshard.planner.one_stage import decide
from autoshard.space.cost_table import CostTable

UNLIMITED = 1e18


@dataclass(frozen=True)
class Point:
    """A budget in bytes per rank, with the plan found for it, or why there is none."""

    budget: float
    plan: Plan | None
    why: str = ""
    proven: bool = False  # that there is none

    @property
    def split(self) -> float:
        """Share of the parameters that are stored split, by count."""
        weights = [x.spec for x in self.plan.layouts if x.kind == "weight"] if self.plan else []
        return sum(any(p >= 0 for p in s) for s in weights) / max(1, len(weights))

    def to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"budget_bytes": self.budget, "fits": self.plan is not None, "why": self.why}
        if self.plan is not None:
            p = self.plan
            out |= {"step_s": p.objective_s, "peak_bytes": p.memory["total"], "gap": p.gap, "status": p.status,
                    "stored_split": self.split, "memory": {k: v for k, v in p.memory.items() if k not in ("total", "limit")}}
        return out


def sweep(table: CostTable, options: Options, budgets: Sequence[float] = (), *, steps: int = 6, has_loss: bool = False,
          model: Mapping[str, Any] | None = None, say: Callable[[str], None] = lambda text: None,
          clock: PhaseTimer | None = None) -> tuple[Point, ...]:
    """Plans from the largest budget to the smallest. Without `budgets`: from what the fastest plan takes down to an eighth
    of it, in `steps` equal ratios. Ctrl-C ends it with the budgets so far. A plan for a smaller budget that is faster
    stands for the larger one too. Raises InfeasibleError where seeds leave no plan at all."""
    if not budgets:
        say("the fastest plan")
        ample = _point(table, options, UNLIMITED, has_loss, model, clock)
        if ample.plan is None:
            raise InfeasibleError(ample.why)
        if ample.plan.interrupted:
            return (replace(ample, budget=float(ample.plan.memory["total"])),)
        budgets = np.geomspace(float(ample.plan.memory["total"]), float(ample.plan.memory["total"]) / 8, steps).tolist()
    points: list[Point] = []
    for budget in sorted(budgets, reverse=True):
        say(f"budget {budget:.4g} bytes")
        try:
            points.append(_point(table, options, budget, has_loss, model, clock))
        except Interrupted:
            if not points:
                raise
            break
        if points[-1].plan is not None and points[-1].plan.interrupted:
            break
        if points[-1].plan is None and points[-1].proven:
            break  # a smaller one fits even less
    return tuple(_best(p, points) for p in points)


def _point(table: CostTable, options: Options, budget: float, has_loss: bool, model: Mapping[str, Any] | None,
           clock: PhaseTimer | None) -> Point:
    try:
        return Point(budget, decide(table, replace(options, memory_budget=budget), has_loss=has_loss, model_info=model, clock=clock))
    except InfeasibleError as e:
        return Point(budget, None, str(e), e.proven)


def _best(point: Point, points: Sequence[Point]) -> Point:
    """What fits a smaller budget fits this one."""
    fitting = [p.plan for p in points if p.plan is not None and p.budget <= point.budget]
    return replace(point, plan=min(fitting, key=lambda p: p.objective_s), why="") if fitting else point
