"""Problems with a few priced rows, by Lagrange multipliers.

A priced row costs price x max(0, load - limit) = max over 0 <= m <= price of m x (load - limit). For fixed multipliers m
the rows are gone and what is left is an ordinary problem; its bound is valid for the whole, and its choice is a candidate
at its true cost. Multipliers follow the cutting plane method (Kelley 1960): every choice found gives a line above the dual
function, and the next multipliers maximise the least of these lines."""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autoshard.search.problem import Items, Problem, Solution, Status, evaluate, row_loads

TOLERANCE = 1e-9
ROUNDS = 12
Solve = Callable[..., Solution]


def solve_priced(problem: Problem, solve: Solve, *, time_limit: float, incumbents: Sequence[np.ndarray] = (),
                 progress: Callable | None = None, **options) -> Solution:
    """Solve with `solve` as the engine for problems without priced rows; same result type, bound always valid."""
    rows = np.flatnonzero(np.isfinite(problem.row_price) & (problem.row_price > 0))
    if not len(rows):
        return solve(problem, time_limit=time_limit, incumbents=incumbents, progress=progress, **options)
    start, found, bound = time.monotonic(), _Found(problem, rows), -np.inf
    for choice in incumbents:
        found.offer(np.asarray(choice))
    multipliers, tried, answer = np.zeros(len(rows)), [], None
    for _ in range(ROUNDS):
        left = time_limit - (time.monotonic() - start)
        if left <= 0:
            break
        answer = solve(_priced_in(problem, rows, multipliers), time_limit=left, incumbents=found.choices, **options)
        if answer.status is Status.INFEASIBLE:
            return answer
        bound = max(bound, answer.bound)
        tried.append(multipliers)
        if answer.choice is not None:
            found.offer(answer.choice)
        if progress and found.choices:
            gap = (found.cost - bound) / max(abs(found.cost), 1e-300)
            progress(found.cost, bound, gap, time.monotonic() - start, f"multipliers {np.array2string(multipliers, precision=3)}")
        if found.cost - bound <= TOLERANCE * max(abs(found.cost), 1e-300) or answer.status is not Status.OPTIMAL:
            break
        multipliers = found.next_multipliers()
        if any(np.allclose(multipliers, t, rtol=1e-6, atol=1e-9) for t in tried):
            break
    left = time_limit - (time.monotonic() - start)
    if found.choices and found.cost - bound > TOLERANCE * abs(found.cost) and left > 0 and answer.status is Status.OPTIMAL:
        last = solve(problem, time_limit=left, incumbents=found.choices, progress=progress, **options)
        return replace(last, bound=max(last.bound, bound), seconds=time.monotonic() - start)
    return found.solution(bound, time.monotonic() - start, answer)


class _Found:
    """Choices so far: their true cost, and the line each one puts above the dual function."""

    def __init__(self, problem: Problem, rows: np.ndarray) -> None:
        self.problem, self.rows = problem, rows
        self.choices: tuple[np.ndarray, ...] = ()
        self.cost = np.inf
        self._lines: list[tuple[float, np.ndarray]] = []

    def offer(self, choice: np.ndarray) -> None:
        cost = evaluate(self.problem, choice)
        if not np.isfinite(cost):
            return
        excess = (row_loads(self.problem, choice) - self.problem.row_limit)[self.rows]
        price = self.problem.row_price[self.rows]
        self._lines.append((cost - float(np.dot(np.maximum(excess, 0.0), price)), excess))
        self.choices = (choice, *self.choices) if cost < self.cost else (*self.choices, choice)
        self.cost = min(self.cost, cost)

    def next_multipliers(self) -> np.ndarray:
        """Maximise min over lines (base + m . excess) over the box 0 <= m <= price; a tiny linear program."""
        from ortools.math_opt.python import mathopt

        model = mathopt.Model()
        m = [model.add_variable(lb=0.0, ub=float(p)) for p in self.problem.row_price[self.rows]]
        level = model.add_variable(lb=-np.inf, ub=np.inf)
        scale = 1.0 / max(abs(base) for base, _ in self._lines)
        for base, excess in self._lines:
            model.add_linear_constraint(level <= base * scale + sum(float(e) * scale * x for e, x in zip(excess, m, strict=True)))
        model.maximize(level)
        result = mathopt.solve(model, mathopt.SolverType.GLOP)
        return np.array([result.variable_values(x) for x in m])

    def solution(self, bound: float, seconds: float, answer: Solution | None) -> Solution:
        if not self.choices:
            return Solution(None, np.inf, bound, answer.status if answer else Status.UNKNOWN, seconds)
        proven = self.cost - bound <= TOLERANCE * max(abs(self.cost), 1e-300)
        status = Status.OPTIMAL if proven else Status.TIME_LIMIT if answer is None or answer.status is Status.OPTIMAL else answer.status
        return Solution(self.choices[0], self.cost, min(bound, self.cost), status, seconds, answer.stats if answer else {})


def _priced_in(problem: Problem, rows: np.ndarray, multipliers: np.ndarray) -> Problem:
    """The problem with multiplier x amount on the nodes, and the priced rows gone."""
    price = np.zeros(len(problem.row_limit))
    price[rows] = multipliers
    items, costs = problem.items, list(problem.node_costs)
    own: dict[tuple[int, int], np.ndarray] = {}
    constant = -float(np.dot(price[rows], problem.row_limit[rows]))
    weight = price[items.row] * items.amount
    used = np.flatnonzero(weight)
    order = used[np.argsort(items.node[used], kind="stable")]
    nodes, starts = np.unique(items.node[order], return_index=True)
    for node, where in zip(nodes.tolist(), np.split(order, starts[1:]) if len(nodes) else (), strict=True):
        extra = np.zeros(len(costs[node]))
        np.add.at(extra, items.strategy[where], weight[where])
        key = (id(problem.node_costs[node]), hash(extra.tobytes()))
        costs[node] = own.setdefault(key, problem.node_costs[node] + extra)
    if constant:
        costs[0] = costs[0] + constant
    kept = ~np.isin(np.arange(len(problem.row_limit)), rows)
    number = np.cumsum(kept) - 1
    hard = kept[items.row]
    rest = Items(items.node[hard], items.strategy[hard], number[items.row[hard]], items.amount[hard])
    return replace(problem, node_costs=tuple(costs), row_limit=problem.row_limit[kept], row_price=problem.row_price[kept], items=rest)
