"""Search problems made from one with memory rows: memory ample, priced, or itself minimised."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from autoshard.formulate.problem_of import Formulation, unreachable
from autoshard.search.problem import Edge, Problem, evaluate, row_loads

ROOMY = 0.7  # of the limit; below it there is room


def rows_of(formulation: Formulation) -> np.ndarray:
    """Its memory rows."""
    return np.array(list(formulation.memory_rows.values()))


def fits_rows(formulation: Formulation, choice: np.ndarray, share: float = 1.0) -> bool:
    """Whether a choice keeps the memory rows, or a share of each limit. Where it does not keep the rows, no timeline of it fits."""
    problem, rows = formulation.problem, rows_of(formulation)
    return bool(np.all(row_loads(problem, choice)[rows] <= share * problem.row_limit[rows]))


def leaves_room(formulation: Formulation, choice: np.ndarray) -> bool:
    """Whether a choice leaves so much of every memory row that its timeline surely fits."""
    return fits_rows(formulation, choice, ROOMY)


def stored_is_too_much(formulation: Formulation) -> bool:
    """Whether stored tensors alone exceed the limit at the end of a step, for any placements and any recomputation."""
    row = formulation.memory_rows["update" if formulation.table.graph.training else "turn"]
    return least_possible(formulation.problem, row) > formulation.problem.row_limit[row]


def least_possible(problem: Problem, row: int) -> float:
    """A lower bound on the row's load: the sum of every node's least amount. If it exceeds the limit, nothing fits."""
    return float(sum(least.min() for least in _with_memory(problem, np.array([row]), 1.0, _free)))


def possible(problem: Problem, choices: Iterable[np.ndarray]) -> list[np.ndarray]:
    """The choices that are feasible with enough memory. Where seeds fix placements, a baseline may be infeasible."""
    enough = ample(problem)
    return [c for c in map(np.asarray, choices) if np.isfinite(evaluate(enough, c))]


def ample(problem: Problem) -> Problem:
    """The problem with more memory than any choice can use."""
    limits = problem.row_limit.copy()
    for row in np.flatnonzero(np.isinf(problem.row_price)):
        limits[row] = unreachable(problem.items, row)
    return replace(problem, row_limit=limits)


def memory_priced(problem: Problem, rows: np.ndarray, price: float) -> Problem:
    """Memory at `price` seconds per byte on each of `rows` instead of limited."""
    return replace(ample(problem), node_costs=_with_memory(problem, rows, price, lambda c: c))


def least_memory(problem: Problem, rows: Iterable[int]) -> Problem:
    """The problem of using as little as possible of the memory `rows` together: forbidden stays forbidden, the rest is free."""
    tables: dict[int, np.ndarray] = {}
    edges = []
    for e in problem.edges:
        if id(e.table) not in tables:
            tables[id(e.table)] = _free(e.table)
        edges.append(Edge(e.u, e.v, tables[id(e.table)], e.rows, e.cols))
    costs = _with_memory(problem, np.array(list(rows)), 1.0, _free)
    return Problem(costs, tuple(edges), groups=problem.groups)


def _free(costs: np.ndarray) -> np.ndarray:
    """0 where a cost is finite, infinite elsewhere."""
    return np.where(np.isfinite(costs), 0.0, np.inf)


def _with_memory(problem: Problem, rows: np.ndarray, price: float, base: Callable[[np.ndarray], np.ndarray]) -> tuple[np.ndarray, ...]:
    """base(node cost) + price x memory per node; nodes alike share their array, as presolve likes it."""
    items, made = problem.items, {}
    on = np.flatnonzero(np.isin(items.row, rows))
    order = on[np.argsort(items.node[on], kind="stable")]
    nodes, starts = np.unique(items.node[order], return_index=True)
    amounts = dict(zip(nodes.tolist(), np.split(order, starts[1:]) if len(nodes) else (), strict=True))
    out = []
    for n, cost in enumerate(problem.node_costs):
        where = amounts.get(n, on[:0])
        key = (id(cost), items.strategy[where].tobytes(), items.amount[where].tobytes())
        if key not in made:
            extra = np.zeros(len(cost))
            np.add.at(extra, items.strategy[where], items.amount[where])
            made[key] = base(cost) + price * extra
        out.append(made[key])
    return tuple(out)
