"""What propagation minimises: the formulation's problem without rows, which elimination can solve exactly.

Seconds of communication (edges, copies, gradient reductions, collectives inside ops) and of compute:

    communication first   communication, then compute, over what narrowing left: the order of MindSpore's propagation
    nothing hides         their sum: no step takes longer
    everything hides      what may hide behind compute does: no step is shorter, so that a bound is one of every plan

Over a whole program that nothing narrows, communication first would gather the inputs and compute everything everywhere (6.5 times
the step of llama 8B), so there is no such order."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.formulate.problem_of import Formulation
from autoshard.search.problem import Problem

SECOND = 2.0 ** -20  # weight of what comes second: less than a millionth of it is no difference in the first


def communication_first(formulation: Formulation) -> Problem:
    """Communication, and of equal communication the least compute."""
    ops = formulation.table.ops
    units = [sum(((ops[m].compute + ops[m].update) * SECOND + ops[m].inner)[p] for m, p in zip(unit.members, unit.picked, strict=True))
             for unit in formulation.units.units]
    return _without_rows(formulation, units)


def nothing_hides(formulation: Formulation) -> Problem:
    """All seconds of communication and compute, added."""
    return _without_rows(formulation, formulation.problem.node_costs[:len(formulation.units.units)])


def everything_hides(formulation: Formulation) -> Problem:
    """The search's own problem where its rows cost nothing."""
    whole = formulation.problem
    return Problem(whole.node_costs, whole.edges, groups=whole.groups)


def narrowed(problem: Problem, domains: Sequence[np.ndarray]) -> Problem:
    """The problem with the strategies of its first nodes restricted to `domains`."""
    costs = list(problem.node_costs)
    for n, left in enumerate(domains):
        if len(left) < len(costs[n]):
            cost = np.full(len(costs[n]), np.inf)
            cost[left] = costs[n][left]
            costs[n] = cost
    return Problem(tuple(costs), problem.edges)


def _without_rows(formulation: Formulation, units: Sequence[np.ndarray]) -> Problem:
    copies = [np.array([(s.price or 0.0) * s.count(formulation.table.graph.runs) for s in copy.states]) for copy in formulation.copies]
    return Problem((*units, *copies), formulation.problem.edges, groups=formulation.problem.groups)
