"""A program to decide about: its search problem, the timelines of its choices, and plans to start from."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autoshard.base.plan import RECOMPUTE_SUFFIX
from autoshard.decide.make_plan import Timelines
from autoshard.decide.walks.baselines import baselines
from autoshard.decide.walks.greedy import greedy_plans
from autoshard.decide.walks.propagate import Propagated, propagate
from autoshard.formulate.problem_of import Formulation, formulate
from autoshard.play.timeline import Timeline
from autoshard.search.problem import Solution, Status, evaluate
from autoshard.space.cost_table import CostTable
from autoshard.space.decision_units import DecisionUnits
from autoshard.space.layers import repeated_layers

NOTHING = Solution(None, np.inf, -np.inf, Status.UNKNOWN, 0.0)


@dataclass(frozen=True, eq=False)
class Program:
    """`formulation`, with the budget in it; `timelines`: the memory of a choice over one step; `starts`: choices that are plans
    already; `settings`: those of the plan; `spread`: the starting plan that the user's seeds alone give, where there are seeds."""

    formulation: Formulation
    timelines: Callable[[np.ndarray], Timeline]
    starts: tuple[np.ndarray, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    spread: Propagated | None = None

    def fits(self, choice: np.ndarray) -> bool:
        """Whether the timeline of a choice stays within the budget."""
        return self.formulation.budget.holds(self.timelines(choice).peak)

    def cheapest_fitting(self, choices: Iterable[np.ndarray]) -> tuple[np.ndarray, float] | None:
        """The cheapest choice that fits, with its cost. Choices that exceed a row of the problem cannot fit."""
        choices = list(choices)
        for cost, i in sorted((evaluate(self.formulation.problem, c), i) for i, c in enumerate(choices)):
            if np.isfinite(cost) and self.fits(choices[i]):
                return choices[i], cost
        return None


def formulate_within(table: CostTable, limit: float, units: DecisionUnits | None = None) -> Formulation:
    """The search problem of a cost table, within so many bytes per rank. `units`: as of `formulate`."""
    return formulate(table, memory_limit=limit, layers=repeated_layers(table.graph), units=units, in_flight=table.training.in_flight)


def with_starts(formulation: Formulation, settings: Mapping[str, Any]) -> Program:
    """The program of a formulation with its starting plans: the user's seeds spread, greedy plans and baselines. `settings`: those
    of the plan."""
    seeds = formulation.table.seeds
    spread = propagate(formulation, seeds) if seeds else None
    starts = (*starting_plans(formulation), *([spread.choice] if spread else []))
    return Program(formulation, Timelines(formulation, settings), starts, settings, spread)


def starting_plans(formulation: Formulation) -> tuple[np.ndarray, ...]:
    """Greedy plans, and baselines where nothing is recomputed."""
    recomputes = any(op.name.endswith(RECOMPUTE_SUFFIX) for op in formulation.table.graph.ops)
    by_hand = () if recomputes else baselines(formulation)
    return tuple(choice for _, choice in (*greedy_plans(formulation), *by_hand))


def settled(found: Solution, choice: np.ndarray, cost: float) -> Solution:
    """`found` with this choice: optimal where its bound says so."""
    proven = cost - found.bound <= 1e-9 * abs(cost)
    return replace(found, choice=choice, cost=cost, bound=min(found.bound, cost), status=Status.OPTIMAL if proven else Status.GAP)
