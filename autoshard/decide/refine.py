"""After the best plan over decision units: the same plan, made cheaper op by op.

Units keep the bound of the search tight, and exclude some plans: on a mesh of one axis those are worth at most 0.4 % of a step, on more
axes, where units are coarser, up to 3 %. There the problem in which every op decides for itself is too hard to close, but to start in it
from a plan that is good is not: neighbourhoods of the plan are solved exactly until none is cheaper (search/routes/neighbourhoods.py).
What they end at depends on the start, and a plan that is poor as a plan over units may be near one that is good op by op. So starting plans
(by rules, without a search) are improved too: the cheapest one where the program is not large, all where the search over units did not close.
Each end is good in other places, and the best mixture of them (search/routes/mixture.py) is at most as dear as any. Where the search over units did
not close, the ends are improved in wider neighbourhoods in the time left.

Every plan over units is a plan op by op, so this never makes a plan dearer. The bound stays the one over units: what it says, that no
plan over units is cheaper, the refined plan keeps. How much cheaper yet another plan op by op might be, nothing says."""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from autoshard.decide.how import How
from autoshard.decide.make_plan import Timelines
from autoshard.decide.program import Program, formulate_within, settled
from autoshard.decide.walks.greedy import complete
from autoshard.decide.walks.reads import Wiring
from autoshard.formulate.problem_of import Formulation
from autoshard.search import neighbourhoods_of
from autoshard.search.board import MARGIN, Event
from autoshard.search.problem import Problem, Solution, Status, distinct, evaluate
from autoshard.space.cost_table import CostTable
from autoshard.space.decision_units import are_coarse, singletons

if TYPE_CHECKING:
    from autoshard.search.routes.neighbourhoods import Neighbourhoods

MOST = 60_000  # strategies of all ops together; above, refining takes longer than the search
TWICE = 12_000  # likewise, for the second start: it takes as long as the first, 3 to 8 CPU seconds; with more it would take what a limit leaves
SHARE = 0.5  # of the time, kept for refining
WORTH = 1e-4  # of the step: less is no reason to leave the plans that the bound is about
LITTLE = 1e-3  # of the step: a wide search that gains less is the last one
AGREEING = 3  # ends of one cost that say what the rest of the starts would: a small model's plan takes half as long
FACT = "op_by_op"  # its name among the facts of a search


def may_refine(table: CostTable) -> bool:
    """Whether a plan of this program is refined: where units are coarse, the problem is small and recomputation is decided."""
    return table.base is None and are_coarse(table) and _size(table) <= MOST


def refine(program: Program, found: Solution, how: How) -> tuple[Program, Solution]:
    """A program whose ops decide for themselves with a cheaper choice that fits, or `program` and `found` as they are. The facts of the
    solution say what was gained, or that the problem is too large."""
    table = program.formulation.table
    if found.choice is None or table.base is not None or not are_coarse(table) or how.clock.expired():
        return program, found
    if not may_refine(table):
        return program, _noting(found, f"not tried: {_size(table):,} strategies of ops, more than {MOST:,}")
    finer = formulate_within(table, program.formulation.budget.limit, singletons(table))
    how = _telling(how, found)
    best = _proven(program, finer, found, how)
    cheaper = [(best.choice, best.cost)] if best is not None else sorted(_improved(program, finer, found, how), key=lambda plan: plan[1])
    worth = [plan for plan in cheaper if plan[1] <= found.cost * (1.0 - WORTH)]
    refined = Program(finer, Timelines(finer, program.settings), (), program.settings, program.spread)
    choice, cost = next((plan for plan in worth if refined.fits(plan[0])), (None, math.inf))
    if choice is None:
        none = "no plan is more than 0.01 % cheaper: proven" if best is not None else "no plan more than 0.01 % cheaper found"
        return program, _noting(found, "a cheaper plan was found, which does not fit in memory" if worth else none)
    over_units = "the best plan" if found.status is Status.OPTIMAL else "the best plan found"
    closed = "; none is 0.01 % cheaper still: proven" if best is not None else ""
    said = _noting(found, f"{100 * (found.cost / cost - 1):.2f} % cheaper than {over_units} over decision units{closed}")
    proven = settled(said, choice, cost)
    return refined, proven if proven.status is Status.OPTIMAL else replace(proven, status=found.status)


def _proven(program: Program, finer: Formulation, found: Solution, how: How) -> Solution | None:
    """The best choice of `finer`, or one within `WORTH` of it; None where that is not soon proven."""
    start = lifted(program.formulation, found.choice, finer)
    proof = how.prove(finer.problem, start, WORTH) if start is not None else None
    return proof if proof is not None and proof.gap <= WORTH else None


def starts(program: Program, found: Solution, finer: Formulation) -> list[np.ndarray]:
    """Choices of `finer` to improve: the plan found over units, then starting plans, the cheapest first. Of these one is enough where that
    plan is the best over units, and none where the program is large besides."""
    if found.status is not Status.OPTIMAL:
        most = len(program.starts)
    else:
        most = 1 if _size(program.formulation.table) <= TWICE else 0
    same = [lifted(program.formulation, each, finer) for each in (found.choice, *_cheapest(program, most))]
    return distinct(each for each in same if each is not None)


def _cheapest(program: Program, most: int) -> list[np.ndarray]:
    """Starting plans that stay within the rows, the cheapest first."""
    problem = program.formulation.problem
    costs = [evaluate(problem, choice) for choice in program.starts]
    return [program.starts[i] for i in np.argsort(costs, kind="stable") if np.isfinite(costs[i])][:most]


def lifted(formulation: Formulation, choice: np.ndarray, finer: Formulation) -> np.ndarray | None:
    """The choice of `finer`, whose units are parts of those of `formulation`, that is the same plan. None where it is over a limit."""
    strategies = formulation.strategy_of(choice)
    picked = np.array([_place(unit.members, unit.picked, strategies) for unit in finer.units.units], dtype=np.int64)
    wiring = Wiring(finer)
    made = [complete(wiring, picked, keep) for keep in (True, False)]
    best = min(made, key=lambda c: evaluate(finer.problem, c))
    return best if np.isfinite(evaluate(finer.problem, best)) else None


def _place(members: tuple[str, ...], picked: tuple[np.ndarray, ...], strategies: Mapping[str, int]) -> int:
    """The strategy of a unit in which its members have theirs."""
    alike = np.all([p == strategies[m] for m, p in zip(members, picked, strict=True)], axis=0)
    return int(np.flatnonzero(alike)[0])


def _telling(how: How, found: Solution) -> How:
    """What is told of progress is the least cost so far, with the bound over units."""
    progress, least = how.progress, found.cost
    if progress is None:
        return how

    def told(event: Event) -> None:
        nonlocal least
        if event.cost <= least:
            least, bound = event.cost, min(found.bound, event.cost)
            progress(replace(event, bound=bound, gap=max(0.0, event.cost - bound) / max(abs(event.cost), 1e-300)))

    return replace(how, progress=told)


def _improved(program: Program, finer: Formulation, found: Solution, how: How) -> list[tuple[np.ndarray, float]]:
    """Cheaper choices with their costs: what neighbourhoods make of every start, the best mixture of those, and what neighbourhoods make
    of it; where the search over units did not close, what wide ones make of all these."""
    ends = _Ends(finer.problem, how, starts(program, found, finer))
    for start in ends.starts:
        if not ends.agree:
            ends.improve(start)
    ends.improve_mixture()
    if found.status is not Status.OPTIMAL:
        ends.widen()
    return ends.known


@dataclass(eq=False)
class _Ends:
    """Where neighbourhoods of `starts` end, with costs, and the best mixture of all of them."""

    problem: Problem
    how: How
    starts: list[np.ndarray]
    ends: list[tuple[np.ndarray, float]] = field(default_factory=list)
    mixed: tuple[np.ndarray, float] | None = None

    @cached_property
    def neighbourhoods(self) -> Neighbourhoods:
        return neighbourhoods_of(self.problem)

    @property
    def known(self) -> list[tuple[np.ndarray, float]]:
        return [*self.ends, *([self.mixed] if self.mixed else [])]

    @property
    def least(self) -> float:
        return min((cost for _, cost in self.known), default=math.inf)

    @property
    def agree(self) -> bool:
        """Whether as many starts as are enough end at the least cost: the rest would say it again."""
        return sum(cost <= self.least * (1.0 + MARGIN) for _, cost in self.ends) >= AGREEING

    def improve(self, start: np.ndarray, wide: bool = False) -> None:
        """One more end, and the mixture with it, which is never dearer than the one before."""
        improved = None if self.how.clock.expired() else self.how.improve(self.problem, start, wide, self.neighbourhoods)
        if improved is not None:
            self.ends.append(improved)
            if len(self.ends) > 1:
                self.mixed = self.how.mix(self.problem, [*(choice for choice, _ in self.known), *self.starts])

    def improve_mixture(self) -> None:
        if self.mixed is not None and self.mixed[1] < min(cost for _, cost in self.ends):
            self.improve(self.mixed[0])

    def widen(self) -> None:
        """The ends once more in wide neighbourhoods, the cheapest first, until one of them brings little."""
        for choice, _ in sorted(self.ends, key=lambda end: end[1]):
            before = self.least
            self.improve(choice, wide=True)
            if self.least > before * (1.0 - LITTLE):
                return


def _noting(found: Solution, fact: str) -> Solution:
    return replace(found, stats={**found.stats, FACT: fact})


def _size(table: CostTable) -> int:
    return sum(map(len, table.strategies.values()))
