"""The search for a plan that fits, over the programs that a training step may become: what backward runs again is part of it."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from autoshard.decide.make_plan import Plays
from autoshard.decide.walks.baselines import baselines
from autoshard.space.cost_table import CostTable
from autoshard.errors import InfeasibleError
from autoshard.decide.fit import (NOTHING, Asked, cheapest_known, cpu_seconds, fits_exactly, search_ample, search_within,
                                stored_is_too_much, with_bound)
from autoshard.formulate.problem_of import Formulation, formulate
from autoshard.decide.walks.greedy import known_plans
from autoshard.space.layers import repeated_layers
from autoshard.decide.leanest import Lean, leanest
from autoshard.decide.why_nothing_fits import explain_infeasible
from autoshard.decide.offload import made_to_fit, search_offloading
from autoshard.decide.options import Options
from autoshard.base.plan import AGAIN
from autoshard.recompute.rewrite import candidates
from autoshard.search.board import Progress
from autoshard.search.problem import Solution, Status
from autoshard.recompute.undecided import open_table, program_with


def formulated(table: CostTable, options: Options) -> Formulation:
    """The search problem of a cost table, within the memory that `options` allow."""
    return formulate(table, memory_limit=options.memory_limit(table.cluster), layers=repeated_layers(table.graph))


def asked_of(formulation: Formulation, settings: Mapping[str, Any]) -> Asked:
    """With the plans that are known beforehand. `settings`: those of a plan."""
    again = any(op.name.endswith(AGAIN) for op in formulation.table.graph.ops)
    by_hand = () if again else baselines(formulation)  # plans by hand run nothing again
    return Asked(formulation, Plays(formulation, settings), [choice for _, choice in (*known_plans(formulation), *by_hand)])


@dataclass(frozen=True, eq=False)
class Programs:
    """The programs that the one of `plain` may become: the same one where nothing is trained. Each is made on first use."""

    plain: Asked
    options: Options
    settings: Mapping[str, Any]

    @property
    def limit(self) -> float:
        """Bytes a rank may use."""
        return self.options.memory_limit(self.plain.formulation.table.cluster)

    @cached_property
    def open(self) -> Asked:
        """It is open what backward runs again: all others are part of this one."""
        return self._of(open_table)

    @cached_property
    def lean(self) -> Asked:
        """Backward runs everything again that it can."""
        return self._of(lambda table: program_with(table, frozenset(candidates(table.graph))))

    @cached_property
    def leanest(self) -> Lean | None:
        """The choice of `lean` that needs least memory, of those that a quarter of the time finds."""
        return leanest(self.lean, self.options.time_limit / 4)

    def _of(self, change: Callable[[CostTable], CostTable]) -> Asked:
        table = self.plain.formulation.table
        return asked_of(formulated(change(table), self.options), self.settings) if table.graph.training else self.plain

    def nothing_fits(self, solution: Solution, only: np.ndarray | None = None) -> InfeasibleError:
        """The error to raise where `solution` has no choice. `only`: the one choice that there was, where nothing was searched."""
        lean = self.leanest if only is None else (only, self.plain.played(only))
        return explain_infeasible(self.open.formulation, solution, self.limit, lean, self.settings, self.options.time_limit / 4)


def searched(programs: Programs, progress: Progress) -> tuple[Asked, Solution]:
    """The problem searched in the end, and what was found. In training the first one has ample memory: where its best plan
    fits, nothing else matters."""
    asked, limit, time_limit = programs.plain, programs.limit, programs.options.time_limit
    how = {"backend": programs.options.search, "progress": progress}
    if stored_is_too_much(asked.formulation):
        return asked, replace(NOTHING, status=Status.INFEASIBLE)
    if not asked.formulation.table.graph.training:
        return asked, search_within(asked.formulation, limit, measure=asked.played, incumbents=asked.known, time_limit=time_limit, **how)
    end = cpu_seconds() + time_limit
    free = search_ample(asked.formulation, incumbents=asked.known, time_limit=time_limit / 2, **how)
    if free.choice is None or fits_exactly(asked.formulation, asked.played(free.choice), limit):
        return asked, free
    if asked.formulation.table.training.offload:
        asked.known.extend(made_to_fit(asked.formulation, [free.choice], asked.played, limit))
    tried, found = _tight(programs, end, how)
    return tried, with_bound(found, max(free.bound, found.bound))


def _tight(programs: Programs, end: float, how: Mapping[str, Any]) -> tuple[Asked, Solution]:
    """It is open what backward runs again; only where no such plan is found, nothing is, or all: where less is open there is less
    to miss. The bound is that of the open program, of which the others are a part."""
    limit, time_limit = programs.limit, programs.options.time_limit
    search = search_offloading if programs.plain.formulation.table.training.offload else search_within

    def within(asked: Asked) -> Solution:
        left = max(time_limit / 4, end - cpu_seconds())
        return search(asked.formulation, limit, measure=asked.played, incumbents=asked.known, time_limit=left, **how)

    first = within(programs.open)
    if first.status is Status.INFEASIBLE:
        return programs.open, first
    tried, found = programs.open, first
    if found.choice is None:
        tried, found = programs.plain, within(programs.plain)
    if found.choice is None:
        tried, found = programs.lean, within(programs.lean)
    known = [(programs.plain, programs.plain.known)]
    if found.choice is None and programs.leanest is not None:
        known.append((programs.lean, [programs.leanest[0]]))
    for asked, choices in known:
        other = cheapest_known(asked.formulation, limit, asked.played, choices)
        if other.cost < found.cost:
            tried, found = asked, other
    return (programs.open, first) if found.choice is None else (tried, with_bound(found, first.bound))
