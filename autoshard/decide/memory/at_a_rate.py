"""A plan in which a byte costs seconds, instead of being limited: what a part of a program does that shares its rank's memory with others.

At one rate for all parts, none of them saves a byte for which another one would have paid less. It is one search without memory rows, where a limit
takes rounds of them; whether all parts fit together, whoever asked has to see. Recomputation is among the choices.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from autoshard.base.plan import Plan
from autoshard.decide.backends import Found
from autoshard.decide.how import How
from autoshard.decide.make_plan import Timelines
from autoshard.decide.memory.memory_problems import memory_priced
from autoshard.decide.options import Options
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.decide.program import Program, formulate_within
from autoshard.decide.walks.greedy import greedy_plans
from autoshard.errors import InfeasibleError
from autoshard.recompute.undecided import open_table
from autoshard.search import Clock
from autoshard.search.problem import Solution
from autoshard.space.cost_table import CostTable

ENOUGH = 0.05
"""The relative gap at which such a search ends: what is found hardly changes below that, and to prove it takes ten times as long."""


def plan_at_rate(table: CostTable, options: Options, rate: float, *, clock: PhaseTimer, model_info: Mapping[str, Any] | None = None,
                 **how: Any) -> Plan:
    """`searched_at_rate`, and the plan read from the solution. `how`: see there."""
    found = searched_at_rate(table, options, rate, clock=clock, **how)
    with clock("assemble"):
        return within(found, table, rate).plan(table, model_info or {}, options.marks)


def searched_at_rate(table: CostTable, options: Options, rate: float, *, clock: PhaseTimer, known: dict[str, Solution] | None = None,
                     has_loss: bool = False) -> Found:
    """The least seconds of a step plus `rate` seconds for every byte at the turn from forward to backward, with all micro-batches in
    flight. The objective of its plan is the seconds alone; it need not fit in the memory that the options say. `known`: see `How`. Raises
    InfeasibleError where no choice was found."""
    limit = options.memory_limit(table.cluster)
    with clock("formulate"):
        formulation = formulate_within(open_table(table) if table.graph.training else table, limit)
        problem = memory_priced(formulation.problem, np.array([formulation.memory_rows["turn"]]), rate)
        start = next(iter(greedy_plans(formulation)))[1]
    how = How(Clock(options.time_limit), options.search, enough=ENOUGH, known=known)
    with clock("search"):
        found = how.solve(problem, (start,))
    if found.choice is None:
        raise InfeasibleError("a short search found no plan", proven=False)
    settings = options.settings(table.graph.training, has_loss)
    return Found(Program(formulation, Timelines(formulation, settings), settings=settings), found, found.status.value)


def within(found: Found, table: CostTable, rate: float) -> Found:
    """`found` with a bound of all plans of the stage of `table` that take no more than the limit: their bytes cost no more than the limit's do.
    Where the search counted more micro-batches in flight than the stage has, each byte may have been counted so many times more."""
    limit = found.program.formulation.budget.limit
    return replace(found, solution=replace(found.solution, bound=found.solution.bound - rate * limit * table.training.counted))
