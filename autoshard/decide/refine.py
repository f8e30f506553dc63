"""After the best plan over decision units: the same plan, made cheaper op by op.

Units keep the bound of the search tight, and exclude some plans: on a mesh of one axis those are worth at most 0.4 % of a step, on more
axes, where units are coarser, up to 3 %. There the problem in which every op decides for itself is too hard to close, but to start in it
from a plan that is good is not: neighbourhoods of the plan are solved exactly until none is cheaper (search/routes/neighbourhoods.py).

Every plan over units is a plan op by op, so this never makes a plan dearer. The bound stays the one over units: what it says, that no
plan over units is cheaper, the refined plan keeps. How much cheaper yet another plan op by op might be, nothing says."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from autoshard.decide.how import How
from autoshard.decide.make_plan import Timelines
from autoshard.decide.program import Program, formulate_within, settled
from autoshard.decide.walks.greedy import complete
from autoshard.decide.walks.reads import Wiring
from autoshard.formulate.problem_of import Formulation
from autoshard.search.board import Event
from autoshard.search.problem import Solution, Status, evaluate
from autoshard.space.cost_table import CostTable
from autoshard.space.decision_units import are_coarse, singletons

MOST = 60_000  # strategies of all ops together; above, refining takes longer than the search
SHARE = 0.3  # of the time, kept for refining
WORTH = 1e-4  # of the step: less is no reason to leave the plans that the bound is about
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
    start = lifted(program.formulation, found.choice, finer)
    cheaper = None if start is None else _improved(finer, start, found, how)
    if cheaper is None:
        return program, found
    choice, cost = cheaper
    if cost > found.cost * (1.0 - WORTH):
        return program, _noting(found, "no plan more than 0.01 % cheaper found")
    refined = Program(finer, Timelines(finer, program.settings), (), program.settings, program.spread)
    if not refined.fits(choice):
        return program, _noting(found, "a cheaper plan was found, which does not fit in memory")
    said = _noting(found, f"{100 * (found.cost / cost - 1):.2f} % cheaper than the best plan over decision units")
    proven = settled(said, choice, cost)
    return refined, proven if proven.status is Status.OPTIMAL else replace(proven, status=found.status)


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


def _improved(finer: Formulation, start: np.ndarray, found: Solution, how: How) -> tuple[np.ndarray, float] | None:
    """The cheapest choice that neighbourhoods lead to, with its cost. What is told of progress has the bound over units."""
    def told(event: Event) -> None:
        bound = min(found.bound, event.cost)
        how.progress(replace(event, bound=bound, gap=max(0.0, event.cost - bound) / max(abs(event.cost), 1e-300)))

    heard = replace(how, progress=told if how.progress else None)
    return heard.improve(finer.problem, start)


def _noting(found: Solution, fact: str) -> Solution:
    return replace(found, stats={**found.stats, FACT: fact})


def _size(table: CostTable) -> int:
    return sum(map(len, table.strategies.values()))
