"""A plan in which a byte costs seconds, instead of being limited: what a part of a program does that shares its rank's memory with others.

At one rate for all parts, none of them saves a byte for which another one would have paid less. It is one search without memory rows, where a limit
takes rounds of them; whether all parts fit together, whoever asked has to see. Recomputation is among the choices.
"""
from __future__ import annotations

import numpy as np

from autoshard.base.plan import Plan
from autoshard.decide.backends import Found
from autoshard.decide.how import How
from autoshard.decide.make_plan import Timelines
from autoshard.decide.memory.memory_problems import memory_priced
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.decide.program import Program
from autoshard.decide.walks.greedy import greedy_plans
from autoshard.errors import InfeasibleError
from autoshard.formulate.problem_of import formulate
from autoshard.recompute.undecided import open_table
from autoshard.space.cost_table import CostTable
from autoshard.space.layers import repeated_layers


def plan_at_rate(table: CostTable, rate: float, how: How, clock: PhaseTimer) -> Plan:
    """The plan with the least seconds of a step plus `rate` seconds for every byte at the turn from forward to backward, with all micro-batches in
    flight. Its objective is the seconds alone, and it has no bound. Raises InfeasibleError where no choice was found."""
    with clock("formulate"):
        open_program = open_table(table)
        formulation = formulate(open_program, layers=repeated_layers(open_program.graph), in_flight=table.training.fullest)
        problem = memory_priced(formulation.problem, np.array([formulation.memory_rows["turn"]]), rate)
        start = next(iter(greedy_plans(formulation)))[1]
    with clock("search"):
        found = how.solve(problem, (start,))
    if found.choice is None:
        raise InfeasibleError("a short search found no plan", proven=False)
    with clock("assemble"):
        program = Program(formulation, Timelines(formulation, {}))
        return Found(program, found, found.status.value).plan(table, {}, {})
