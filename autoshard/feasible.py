"""Why no plan fits, and how much memory the least plan needs."""
from __future__ import annotations

from dataclasses import replace

import numpy as np

from autoshard.errors import InfeasibleError
from autoshard.formulate import MEMORY, Formulation
from autoshard.search import solve
from autoshard.search.problem import Edge, Problem, Solution, row_loads

SECONDS = 30.0


def explain_infeasible(formulation: Formulation, solution: Solution, limit: float) -> InfeasibleError:
    """The error to raise: the memory the fastest plan wants, a proven lower bound, and the least found."""
    problem = formulation.problem
    least = solve(least_memory(problem), time_limit=SECONDS)
    if least.choice is None:
        return InfeasibleError("no choice of strategies satisfies all seeds, whatever the memory; "
                               "take seeds away until a plan exists, or leave dims open with ...")
    free = solve(replace(problem, row_limit=np.where(np.arange(len(problem.row_limit)) == MEMORY, np.inf, problem.row_limit)),
                 time_limit=SECONDS)
    wants = row_loads(problem, free.choice)[MEMORY] if free.choice is not None else least.cost
    gib = 2**30
    certain = "" if least.bound > limit else f" (not proven: the search stopped, {solution.status.value})"
    return InfeasibleError(
        f"no plan fits in {limit / gib:.4g} GiB per rank{certain}: the fastest plan needs {wants / gib:.4g} GiB for parameters, "
        f"gradients, optimizer state and saved activations; no plan needs less than {least.bound / gib:.4g} GiB (proven), and the "
        f"least found needs {least.cost / gib:.4g} GiB. Raise the memory budget, use more ranks or a smaller batch")


def least_memory(problem: Problem) -> Problem:
    """The problem of using as little of the memory row as possible: forbidden stays forbidden, the rest is free."""
    costs = [np.where(np.isfinite(c), 0.0, np.inf) for c in problem.node_costs]
    items = problem.items
    for i in np.flatnonzero(items.row == MEMORY):
        costs[items.node[i]][items.strategy[i]] += items.amount[i]
    tables: dict[int, np.ndarray] = {}
    edges = []
    for e in problem.edges:
        if id(e.table) not in tables:
            tables[id(e.table)] = np.where(np.isfinite(e.table), 0.0, np.inf)
        edges.append(Edge(e.u, e.v, tables[id(e.table)], e.rows, e.cols))
    return Problem(tuple(costs), tuple(edges), groups=problem.groups)
