"""Known plans (data parallel, fully sharded) as incumbents: a plan that was not proven optimal is never
worse than one of these that fits. Each is the same problem with the parameters' placements restricted."""
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autoshard.formulate import Formulation
from autoshard.search import solve
from autoshard.search.problem import Problem, Solution, Status
from autoshard.spec import R, Spec

PROVEN = (Status.OPTIMAL, Status.INFEASIBLE)
SHARE = 0.15  # of the time limit, for each known plan


def solve_with_known_plans(formulation: Formulation, *, backend: str, time_limit: float,
                           progress: Callable | None = None) -> Solution:
    """Solve; where nothing was proven, solve the known plans too and continue from the best of all."""
    start, problem = time.monotonic(), formulation.problem
    first = solve(problem, backend=backend, time_limit=time_limit * (1 - 3 * SHARE), progress=progress)
    if first.status in PROVEN:
        return first
    found = [first.choice] if first.choice is not None else []
    for name in KNOWN:
        known = solve(restrict(formulation, name), backend=backend, time_limit=time_limit * SHARE, progress=progress)
        if known.choice is not None and not (first.choice is not None and known.cost >= first.cost):
            found.append(known.choice)
    if len(found) == (first.choice is not None):
        return first
    left = max(1.0, time_limit - (time.monotonic() - start))
    last = solve(problem, backend=backend, time_limit=left, incumbents=tuple(found), progress=progress)
    return replace(last, bound=max(last.bound, first.bound))


def _data_parallel(spec: Spec) -> int:
    """Rank of a storage spec, lower is preferred: parameters whole everywhere."""
    return sum(p != R for p in spec)


def _fully_sharded(spec: Spec) -> int:
    """Parameters split over as many mesh axes as they divide by."""
    return sum(p == R for p in spec)


KNOWN: dict[str, Callable[[Spec], int]] = {"data parallel": _data_parallel, "fully sharded": _fully_sharded}


def restrict(formulation: Formulation, name: str) -> Problem:
    """The problem in which every parameter takes one of the storage specs that the known plan prefers."""
    rank, costs = KNOWN[name], list(formulation.problem.node_costs)
    for node, op in enumerate(formulation.op_names):
        if formulation.table.graph.op(op).kind == "param":
            specs = formulation.table.strategies[op].output_specs[0]
            ranks = np.array([rank(s) for s in specs.specs])[specs.index]
            costs[node] = np.where(ranks == ranks.min(), costs[node], np.inf)
    return replace(formulation.problem, node_costs=tuple(costs))
