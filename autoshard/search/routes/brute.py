"""Every choice of a tiny problem, evaluated without any reduction: the oracle of the other backends."""
from __future__ import annotations

import numpy as np

from autoshard.errors import ProblemError
from autoshard.search.board import Board
from autoshard.search.problem import Problem, evaluate

LARGEST = 2_000_000
CHUNK = 65_536


def search_brute(board: Board) -> None:
    """Raises ProblemError when there are more than `LARGEST` choices."""
    problem = board.problem
    sizes = [len(c) for c in problem.node_costs]
    count = 1
    for size in sizes:
        count *= size
        if count > LARGEST:
            raise ProblemError(f"brute force tries at most {LARGEST} choices; use another backend")
    best, best_cost = None, np.inf
    for first in range(0, count, CHUNK):
        codes = np.arange(first, min(first + CHUNK, count))
        choices = np.zeros((len(codes), len(sizes)), dtype=np.int64)
        for v, size in enumerate(sizes):  # np.unravel_index takes at most 64 nodes
            codes, choices[:, v] = np.divmod(codes, size)
        costs = _evaluate_all(problem, choices)
        for at in np.argsort(costs, kind="stable")[:1]:
            if costs[at] < best_cost:
                best, best_cost = choices[at], float(costs[at])
    if best is None:
        board.infeasible = True
        return
    board.offer(best, "brute force")
    board.raise_bound(evaluate(problem, best), "brute force")


def _evaluate_all(problem: Problem, choices: np.ndarray) -> np.ndarray:
    total = np.zeros(len(choices))
    for v, cost in enumerate(problem.node_costs):
        total += cost[choices[:, v]]
    for e in problem.edges:
        total += e.table[e.rows[choices[:, e.u]], e.cols[choices[:, e.v]]]
    items = problem.items
    for row, (limit, price) in enumerate(zip(problem.row_limit, problem.row_price, strict=True)):
        load = np.zeros(len(choices))
        for i in np.flatnonzero(items.row == row):
            load += items.amount[i] * (choices[:, items.node[i]] == items.strategy[i])
        over = np.maximum(0.0, load - limit)
        if np.isinf(price):
            total[over > 1e-9 * max(1.0, abs(limit))] = np.inf
        else:
            total += price * over
    times = problem.intervals
    if times is not None:
        live = np.flatnonzero(times.lo < times.hi)
        for point in np.unique(times.lo[live]):
            load = np.zeros(len(choices))
            for i in live[(times.lo[live] <= point) & (point < times.hi[live])]:
                load += times.amount[i] * (choices[:, times.node[i]] == times.strategy[i])
            total[load > times.limit + 1e-9 * max(1.0, abs(times.limit))] = np.inf
    return total
