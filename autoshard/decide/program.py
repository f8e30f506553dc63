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
from autoshard.search.problem import Seen, Solution, Status, evaluate
from autoshard.space.cost_table import CostTable
from autoshard.space.decision_units import DecisionUnits
from autoshard.space.layers import repeated_layers

MOST_CHOICES, MOST_NEAR = 8, 12  # that one budget leaves for another
NOTHING = Solution(None, np.inf, -np.inf, Status.UNKNOWN, 0.0)


@dataclass(eq=False)
class Learned:
    """What searches of a program within one budget leave for those within another: its `variants` with recomputation, by name; `choices` that
    are plans, which may fit there too; choices `near` the best prices of its rows, from which these are guessed, and those `seen` by a search of
    fewer strategies; moments that needed floor rows,
    `floored`, each with the choice near which its row is exact; and budgets with plans whose neighbourhoods have no cheaper one, `best_around`."""

    variants: dict[str, Program] = field(default_factory=dict)
    choices: list[np.ndarray] = field(default_factory=list)
    near: tuple[np.ndarray, ...] = ()
    seen: tuple[Seen, ...] = ()
    floored: list[tuple[str, np.ndarray]] = field(default_factory=list)
    best_around: set[tuple[float, bytes]] = field(default_factory=set)

    def keep(self, found: Solution) -> None:
        """Remember what a search found."""
        self.near = found.near[-MOST_NEAR:] or self.near
        if found.choice is not None and not any(np.array_equal(found.choice, c) for c in self.choices):
            self.choices = [*self.choices, found.choice][-MOST_CHOICES:]


@dataclass(frozen=True, eq=False)
class Program:
    """`formulation`, with the budget in it; `timelines`: the memory of a choice over one step; `starts`: choices that are plans
    already; `settings`: those of the plan; `spread`: the starting plan that the user's seeds alone give, where there are seeds.
    `learned`: what holds for any budget."""

    formulation: Formulation
    timelines: Callable[[np.ndarray], Timeline]
    starts: tuple[np.ndarray, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    spread: Propagated | None = None
    learned: Learned = field(default_factory=lambda: Learned())

    def within(self, limit: float) -> Program:
        """The same program within another budget, in bytes per rank. All that is known of it and does not depend on the budget is shared."""
        formulation = self.formulation
        if formulation.budget.limit == limit:
            return self
        budget = replace(formulation.budget, limit=limit)
        limits = formulation.problem.row_limit.copy()
        limits[list(formulation.memory_rows.values())] = budget.peak
        return replace(self, formulation=replace(formulation, problem=replace(formulation.problem, row_limit=limits), budget=budget))

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
    return formulate(table, memory_limit=limit, layers=repeated_layers(table.graph), units=units, in_flight=table.training.fullest)


def with_starts(formulation: Formulation, settings: Mapping[str, Any], starts: tuple[np.ndarray, ...] | None = None) -> Program:
    """The program of a formulation with its starting plans: the user's seeds spread, greedy plans and baselines, or `starts` where they are
    known. `settings`: those of the plan."""
    seeds = formulation.table.seeds
    spread = propagate(formulation, seeds) if seeds else None
    found = starting_plans(formulation) if starts is None else starts
    return Program(formulation, Timelines(formulation, settings), (*found, *([spread.choice] if spread else [])), settings, spread)


def starting_plans(formulation: Formulation) -> tuple[np.ndarray, ...]:
    """Greedy plans, and baselines where nothing is recomputed."""
    recomputes = any(op.name.endswith(RECOMPUTE_SUFFIX) for op in formulation.table.graph.ops)
    by_hand = () if recomputes else baselines(formulation)
    return tuple(choice for _, choice in (*greedy_plans(formulation), *by_hand))


def settled(found: Solution, choice: np.ndarray, cost: float) -> Solution:
    """`found` with this choice: optimal where its bound says so."""
    proven = cost - found.bound <= 1e-9 * abs(cost)
    return replace(found, choice=choice, cost=cost, bound=min(found.bound, cost), status=Status.OPTIMAL if proven else Status.GAP)
