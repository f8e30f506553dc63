"""Bounds on what a part of a program takes, whatever is around it."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from autoshard.base.graph import FORWARD, Graph
from autoshard.base.windows import END, START
from autoshard.decide.how import How
from autoshard.formulate.builder import FIRST_WINDOW, MEMORY
from autoshard.formulate.problem_of import formulate, unreachable
from autoshard.recompute.undecided import open_table
from autoshard.search.priced_bound import priced_bound
from autoshard.search.problem import Problem
from autoshard.space.cost_table import CostTable, build_cost_table
from autoshard.space.layers import repeated_layers

MANY = 2**20
"""Runs in a step. What is paid once a step is less than a millionth of the bound then."""
CLOSE = 0.01
"""Relative gap of a bound that is not worth more work."""
Prices = tuple[float, float, float]
"""Of a second by which communication that may hide exceeds what hides it: in forward, and in backward; of a byte at the end of forward."""


@dataclass(frozen=True)
class Held:
    """Memory in a bound of a part of a program. `flying`: micro-batches that are held at once; `share`: the part's bytes, if all parts of its rank
    take the same; `dearest`: more seconds than a byte is worth."""

    flying: int
    share: float
    dearest: float


def least_run(table: CostTable, how: How) -> tuple[float, float]:
    """Seconds of one run of all windows that run for every micro-batch, at least, and of the optimizer's update, at least: with ample memory, and
    all communication that can be hidden is. So the sum over parts of a program is a bound of the whole, since communication that
    one part does not hide another one may. What runs once a step costs nothing here."""
    graph = replace(table.graph, microbatches=MANY)
    often = build_cost_table(graph, table.mesh, table.cluster, table.strategies, table.training)
    problem = _ample(formulate(replace(often, seeds=table.seeds), layers=repeated_layers(graph)).problem)
    bound, _ = priced_bound(problem, how.clock, np.zeros(len(problem.row_limit)), CLOSE)
    return max(0.0, bound) / MANY, sum(float(np.min(table.ops[op.name].update)) for op in graph.of_kind("param"))


def least_step(table: CostTable, how: How, prices: Prices | None = None, held: Held | None = None) -> tuple[float, Prices]:
    """Seconds of a step with all its micro-batches and what it does once, at least, in ample memory, and the prices at which that holds; by default
    the ones that make it about largest.

    A window whose communication exceeds what hides it by x costs `row_price x max(0, x)`, which is at least `price x x` for each price up to that.
    So the sum over parts at the same prices is a bound of the whole. Windows of backward have one price, and those at the ends of a step cost all
    of it, or, where they may be one with others (one micro-batch), as much as those: then the sum holds whether backward is split or not.

    With `held`, seconds and the price of the bytes at the end of forward, whatever runs again. What parts of a rank hold together is within its
    limit, so the rank takes at least the sum over parts, less the price of the limit."""
    opened = table if held is None else open_table(table)
    graph, flying = opened.graph, 1 if held is None else held.flying
    problem = _ample(formulate(opened, layers=repeated_layers(graph), in_flight=(flying, 0)).problem)
    row_of = {name: FIRST_WINDOW + at for name, at in graph.window_index.items()} if np.isfinite(problem.row_price).any() else {}
    if held is not None:
        limits, dearest = problem.row_limit.copy(), problem.row_price.copy()
        limits[MEMORY], dearest[MEMORY] = held.share, held.dearest
        problem = replace(problem, row_limit=limits, row_price=dearest)
    group, into = _groups(graph), np.arange(len(problem.row_limit))
    for name, row in row_of.items():
        into[row] = next(row_of[other] for other in row_of if group[other] == group[name])
    problem = replace(problem, items=replace(problem.items, row=into[problem.items.row]))
    searched = prices is None and np.isfinite(problem.row_price).any()
    given = None if searched else _given(problem, prices or (0.0, 0.0, 0.0), {name: row for name, row in row_of.items() if into[row] == row}, group)
    bound, found = priced_bound(problem, how.clock, given, CLOSE)
    first = {group[name]: float(found[into[row]]) for name, row in row_of.items()}
    byte = 0.0 if held is None else float(found[MEMORY])
    least = bound if held is None else bound + byte * held.share
    return max(0.0, least), prices or (first.get("forward", 0.0), first.get("backward", 0.0), byte)


def _given(problem: Problem, prices: Prices, row_of: Mapping[str, int], group: Mapping[str, str]) -> np.ndarray:
    """Prices of all rows: those of windows that `row_of` has, and of the bytes."""
    given, at = np.zeros(len(problem.row_price)), dict(zip(("forward", "backward"), prices))
    for name, row in row_of.items():
        given[row] = min(float(problem.row_price[row]), at.get(group[name], np.inf))
    given[MEMORY] = prices[2] if np.isfinite(problem.row_price[MEMORY]) else 0.0
    return given


def _groups(graph: Graph) -> dict[str, str]:
    """By window, those that are one for a bound."""
    alone = graph.microbatches > 1
    return {name: name if alone and name in (START, END) else "forward" if name in (START, FORWARD) else "backward" for name in graph.window_index}


def _ample(problem: Problem) -> Problem:
    """With no limit on memory."""
    hides = np.isfinite(problem.row_price)
    return replace(problem, row_limit=np.array([0.0 if hides[r] else unreachable(problem.items, r) for r in range(len(hides))]))
