"""Why no plan fits, and how much memory the least plan needs."""
from __future__ import annotations

from dataclasses import replace

import numpy as np

from autoshard.errors import InfeasibleError
from autoshard.formulate import MEMORY, Formulation, unreachable
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
    ample = problem.row_limit.copy()
    ample[MEMORY] = unreachable(problem.items, MEMORY)
    free = solve(replace(problem, row_limit=ample), time_limit=SECONDS)
    wants = row_loads(problem, free.choice)[MEMORY] if free.choice is not None else least.cost
    certain = "" if least.bound > limit else f" (not proven: the search stopped, {solution.status.value})"
    return InfeasibleError(
        f"no plan fits in {_text(limit)} per rank{certain}: the fastest plan needs {_text(wants)} for parameters, "
        f"gradients, optimizer state and saved activations; no plan needs less than {_text(least.bound)} (proven), and the "
        f"least found needs {_text(least.cost)}. Raise the memory budget, use more ranks or a smaller batch")


def _text(nbytes: float) -> str:
    """Bytes for a message, in the largest unit that leaves a number above 1."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes:.0f} bytes"


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
