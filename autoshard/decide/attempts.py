"""Search for a plan that fits in memory. Tries: nothing recomputed; recomputation chosen by the search; all of it recomputed."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from autoshard.base.plan import AGAIN
from autoshard.decide.fit import NOTHING, Asked, cheapest_known, fits_exactly, search_ample, search_within, stored_is_too_much, with_bound
from autoshard.decide.leanest import Lean, leanest
from autoshard.decide.make_plan import Plays
from autoshard.decide.offload import made_to_fit, search_offloading
from autoshard.decide.options import Options
from autoshard.decide.walks.baselines import baselines
from autoshard.decide.walks.greedy import known_plans
from autoshard.decide.why_nothing_fits import explain_infeasible
from autoshard.errors import InfeasibleError
from autoshard.formulate.problem_of import Formulation, formulate
from autoshard.recompute.rewrite import candidates
from autoshard.recompute.undecided import open_table, program_with
from autoshard.search import Clock
from autoshard.search.board import Progress
from autoshard.search.problem import Solution, Status, row_loads
from autoshard.space.cost_table import CostTable
from autoshard.space.layers import repeated_layers

AMPLE = 0.5  # share of the time limit for the search with ample memory, where memory may matter
ROOMY = 0.7  # of the limit; below it there is room
UNSURE = 0.5  # share of the time left for a search that may find nothing; the rest is for explaining why nothing fits
LEANEST = 0.5  # share of the time left after that for the plan that needs least memory


def formulated(table: CostTable, options: Options) -> Formulation:
    """The search problem of a cost table, within the memory that `options` allow."""
    return formulate(table, memory_limit=options.memory_limit(table.cluster), layers=repeated_layers(table.graph),
                     in_flight=table.training.in_flight)


def asked_of(formulation: Formulation, settings: Mapping[str, Any]) -> Asked:
    """The problem with its starting plans: greedy plans and baselines. `settings`: the settings of the plan."""
    again = any(op.name.endswith(AGAIN) for op in formulation.table.graph.ops)
    by_hand = () if again else baselines(formulation)  # baselines recompute nothing
    return Asked(formulation, Plays(formulation, settings), [choice for _, choice in (*known_plans(formulation), *by_hand)])


@dataclass(frozen=True, eq=False)
class Programs:
    """The training program without recomputation (`plain`) and its variants with recomputation, each built on first use. For
    inference all are `plain`. `clock`: limit of the whole search, including the time to explain why nothing fits."""

    plain: Asked
    options: Options
    settings: Mapping[str, Any]
    clock: Clock

    @property
    def limit(self) -> float:
        """Bytes a rank may use."""
        return self.options.memory_limit(self.plain.formulation.table.cluster)

    @cached_property
    def open(self) -> Asked:
        """The program in which recomputation is not decided yet. Every plan of the other programs is a plan of this one."""
        return self._of(open_table)

    @cached_property
    def lean(self) -> Asked:
        """The program that recomputes every op that may be recomputed."""
        return self._of(lambda table: program_with(table, frozenset(candidates(table.graph))))

    @cached_property
    def leanest(self) -> Lean | None:
        """The choice of `lean` with the least memory that a share of the time left finds."""
        return leanest(self.lean, self.clock.part(LEANEST))

    @cached_property
    def fitting(self) -> Solution | None:
        """`leanest` as a solution of `lean`; None where it does not fit."""
        if self.leanest is None:
            return None
        found = cheapest_known(self.lean.formulation, self.limit, self.lean.played, [self.leanest[0]])
        return None if found.choice is None else found

    def _of(self, change: Callable[[CostTable], CostTable]) -> Asked:
        table = self.plain.formulation.table
        return asked_of(formulated(change(table), self.options), self.settings) if table.graph.training else self.plain

    def nothing_fits(self, solution: Solution, only: np.ndarray | None = None) -> InfeasibleError:
        """The error for a `solution` without a choice. `only`: the one choice considered, where nothing was searched."""
        lean = self.leanest if only is None else (only, self.plain.played(only))
        return explain_infeasible(self.open.formulation, solution, self.limit, lean, self.settings, self.clock)


def searched(programs: Programs, progress: Progress) -> tuple[Asked, Solution]:
    """Search; return the problem that was solved and its solution. Training is first searched with ample memory: if that plan
    fits, it is the answer. If the search is stopped, the cheapest starting plan that fits is returned."""
    tried, found = _searched(programs, {"backend": programs.options.search, "progress": progress})
    if found.choice is None and found.status is not Status.INFEASIBLE:
        tried, found = _known(programs, tried, found)
    if programs.clock.stopped and found.choice is not None and found.status is not Status.OPTIMAL:
        found = replace(found, status=Status.INTERRUPTED)
    return tried, found


def _searched(programs: Programs, how: Mapping[str, Any]) -> tuple[Asked, Solution]:
    asked, limit, clock = programs.plain, programs.limit, programs.clock
    if stored_is_too_much(asked.formulation):
        return asked, replace(NOTHING, status=Status.INFEASIBLE)
    if not asked.formulation.table.graph.training:
        part = clock.part(_share(programs))
        return asked, search_within(asked.formulation, limit, measure=asked.played, incumbents=asked.known, clock=part, **how)
    share = 1.0 if _is_roomy(asked) else AMPLE
    free = search_ample(asked.formulation, incumbents=asked.known, clock=clock.part(share), **how)
    if free.choice is None or fits_exactly(asked.formulation, asked.played(free.choice), limit):
        return asked, free
    if asked.formulation.table.training.offload:
        asked.known.extend(made_to_fit(asked.formulation, [free.choice], asked.played, limit))
    tried, found = _tight(programs, how)
    return tried, with_bound(found, max(free.bound, found.bound))


def _is_roomy(asked: Asked) -> bool:
    """Whether every starting plan, fully replicated ones included, leaves room on every memory row: memory then hardly matters."""
    problem, rows = asked.formulation.problem, np.array(list(asked.formulation.memory_rows.values()))
    return all(bool(np.all(row_loads(problem, choice)[rows] <= ROOMY * problem.row_limit[rows])) for choice in asked.known)


def _share(programs: Programs) -> float:
    """Share of the time left: all of it where a starting plan fits; else some is kept to find one, or to explain why none exists."""
    asked = programs.plain
    return 1.0 if cheapest_known(asked.formulation, programs.limit, asked.played, asked.known).choice is not None else UNSURE


def _tight(programs: Programs, how: Mapping[str, Any]) -> tuple[Asked, Solution]:
    """Try: recompute what the search chooses; else nothing; else everything. Fewer options are easier to search. The last two are
    tried only where the plan of least memory fits. The bound is that of the first program, which contains the other two."""
    limit, clock = programs.limit, programs.clock
    search = search_offloading if programs.plain.formulation.table.training.offload else search_within

    def within(asked: Asked, share: float) -> Solution:
        return search(asked.formulation, limit, measure=asked.played, incumbents=asked.known, clock=clock.part(share), **how)

    if clock.expired():
        return programs.plain, NOTHING
    first = within(programs.open, _share(programs))
    if first.status is Status.INFEASIBLE:
        return programs.open, first
    found = [(programs.open, first)]
    if first.choice is None and programs.fitting is not None:
        found += [(asked, within(asked, share)) for asked, share in ((programs.plain, 0.5), (programs.lean, 1.0))]
    tried, best = min((*found, _known(programs, programs.open, NOTHING)), key=lambda pair: pair[1].cost)
    return (programs.open, first) if best.choice is None else (tried, with_bound(best, first.bound))


def _known(programs: Programs, tried: Asked, found: Solution) -> tuple[Asked, Solution]:
    """The cheapest starting plan that fits; else the plan of least memory; else (`tried`, `found`). After Ctrl-C the plan of least
    memory is not searched for."""
    best = cheapest_known(programs.plain.formulation, programs.limit, programs.plain.played, programs.plain.known)
    if best.choice is not None:
        return programs.plain, best
    if not programs.clock.stopped and programs.fitting is not None:
        return programs.lean, programs.fitting
    return tried, found
