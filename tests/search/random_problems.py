"""Small random problems that reach every reduction: forbidden pairs, ties, shared index vectors, rows, intervals, groups;
and what a backend's answer to one must keep."""
from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

import numpy as np

from autoshard.search import Board, Clock, Edge, Intervals, Items, Problem, Solution, Status, evaluate, solve
from autoshard.search.reductions import Infeasible, reduce_core
from autoshard.search.reductions.core import build
from autoshard.search.routes import bucket_elimination, plans, priced, prices
from autoshard.search.routes.plans import search_few_rows
from autoshard.search.routes.small import search_small
from autoshard.search.tie import tied_core

EXACT = ("auto", "milp", "cp_sat")  # these decide every small problem
WORK = 1500  # steps of the local search


def random_problem(seed: int, *, nodes: int = 7, most: int = 4) -> Problem:
    """A problem of at most `most ** nodes` choices. Costs are whole numbers or seconds; about 39 % are infeasible."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, nodes + 1))
    sizes = rng.integers(1, most + 1, n)
    unit = [1.0, 1e-5, 1e4][int(rng.integers(3))]
    whole = bool(rng.integers(2))
    infinite = float(rng.choice([0.0, 0.1, 0.4]))

    def draw(*shape: int) -> np.ndarray:
        a = rng.integers(0, int(rng.choice([2, 4, 50])), shape).astype(float) if whole else rng.random(shape)
        a = np.where(rng.random(shape) < infinite, np.inf, a * unit)
        return a

    edges = []
    for _ in range(int(rng.integers(0, 2 * n))):
        u, v = (int(x) for x in rng.integers(0, n, 2))
        if u != v:
            edges.append(_edge(rng, u, v, sizes, draw))
    rows = int(rng.integers(0, 4))
    limit, price, items = _rows(rng, n, sizes, rows, unit)
    costs = tuple(_some_finite(rng, draw(k)) for k in sizes)
    intervals = _intervals(rng, n, sizes) if rng.random() < 0.5 else None
    costs, groups = _groups(rng, costs)
    return Problem(costs, tuple(edges), limit, price, items, intervals, groups)


def _groups(rng: np.random.Generator, costs: tuple[np.ndarray, ...]) -> tuple[tuple[np.ndarray, ...], np.ndarray | None]:
    """Half of the problems have copies: nodes of one size and cost, whatever their edges and items are."""
    if rng.random() < 0.5:
        return costs, None
    group = rng.integers(-1, 2, len(costs))
    group[[len(c) != len(costs[0]) for c in costs]] = -1
    first = {g: costs[v] for v, g in reversed(list(enumerate(group.tolist())))}
    return tuple(costs[v] if g < 0 else first[g] for v, g in enumerate(group.tolist())), group


def _some_finite(rng: np.random.Generator, cost: np.ndarray) -> np.ndarray:
    cost[int(rng.integers(len(cost)))] = 1.0
    return cost


def _edge(rng, u, v, sizes, draw) -> Edge:
    if rng.random() < 0.5:
        return Edge(u, v, draw(sizes[u], sizes[v]), np.arange(sizes[u]), np.arange(sizes[v]))
    a, b = rng.integers(1, 4, 2)
    kind = rng.random()
    table = draw(int(a), int(b))
    if kind < 0.3:  # additive: separable
        table = draw(int(a), 1) + draw(1, int(b))
    elif kind < 0.5 and a == b:  # a bijection
        table = np.where(np.eye(a, dtype=bool), table, np.inf)
    return Edge(u, v, table, rng.integers(0, a, sizes[u]), rng.integers(0, b, sizes[v]))


def _rows(rng, n, sizes, rows, unit) -> tuple[np.ndarray, np.ndarray, Items]:
    node, strategy, row, amount = [], [], [], []
    price = np.where(rng.random(rows) < 0.5, np.inf, rng.choice([0.1, 1.0, 3.0], rows) * unit)
    for r in range(rows):
        for v in range(n):
            for s in range(int(sizes[v])):
                if rng.random() < 0.6:
                    node.append(v), strategy.append(s), row.append(r)
                    amount.append(float(rng.integers(-3 if np.isfinite(price[r]) else 0, 8)))
    limit = rng.integers(-2, 4 * n + 2, rows).astype(float)
    limit = np.where(np.isinf(price), np.abs(limit), limit)
    return limit, price, Items(*(np.array(x, dtype=np.int64) for x in (node, strategy, row)), np.array(amount))


def _intervals(rng, n, sizes) -> Intervals:
    node, strategy, lo, hi, amount = [], [], [], [], []
    for v in range(n):
        for _ in range(int(rng.integers(1, 3))):
            a, b = sorted(rng.integers(0, 8, 2))
            for s in range(int(sizes[v])):
                node.append(v), strategy.append(s), lo.append(a), hi.append(b), amount.append(float(rng.integers(0, 9)))
    arrays = (np.array(x, dtype=np.int64) for x in (node, strategy, lo, hi))
    return Intervals(float(rng.integers(2 * n, 7 * n + 1)), *arrays, np.array(amount))


def layered_problem(seed: int, layers: int = 4, width: int = 5, most: int = 4) -> Problem:
    """Equal layers of nodes that all see each other, between an input and an output, a node that all layers read, and rows that they share: nothing of
    it is reduced away."""
    rng, every = np.random.default_rng(seed), np.arange(most)
    costs, loads = [rng.random(most) for _ in range(width)], rng.integers(0, 6, (width, most, 2))
    inside = {(a, b): rng.random((most, most)) for a in range(width) for b in range(a)}
    ahead, read = rng.random((2, most, most)), rng.random((most, most))
    first, last, all_read = (layers * width + i for i in range(3))
    edges = [Edge(first, 0, ahead[0], every, every), Edge(last, layers * width - 1, ahead[1], every, every)]
    for at in range(0, layers * width, width):
        edges += [Edge(at + a, at + b, table, every, every) for (a, b), table in inside.items()]
        edges += [Edge(all_read, at + 1, read, every, every)]
        edges += [Edge(at + width - 1 - i, at + width + i, ahead[i], every, every) for i in range(2) if at + width < layers * width]
    items = [(layer * width + a, s, r, float(loads[a, s, r])) for layer in range(layers) for a in range(width) for s in range(most) for r in range(2)]
    node, strategy, row, amount = (np.array(x) for x in zip(*items, strict=True))
    limit = loads.mean((0, 1)) * width * layers * 0.9
    groups = np.array([*(list(range(width)) * layers), -1, -1, -1])
    return Problem((*costs * layers, *(rng.random(most) for _ in range(3))), tuple(edges), limit,
                   np.array([0.2, np.inf if rng.random() < 0.3 else 0.3]), Items(node, strategy, row, amount), groups=groups)


def answer(problem: Problem, route: str) -> Solution:
    """What a backend, or one of the routes that small problems do not reach by themselves, says about `problem`."""
    if route in ("by sweeps", "large tables"):
        with ExitStack() as patched:
            patched.enter_context(patch.object(bucket_elimination, "MOST_PAIRS", -1))
            for module in (plans, priced, prices) if route == "large tables" else ():
                patched.enter_context(patch.object(module, "STORED", -1))
            patched.enter_context(patch.object(plans, "CLOSE", 0.0))  # as users have it a search on large tables ends there
            return _forced(problem, "few rows")
    if route in ("few rows", "by prices"):
        return _forced(problem, route)
    return solve(problem, backend=route, time_limit=20.0, work_limit=WORK if route == "local" else None, threads=1)


def _forced(problem: Problem, route: str) -> Solution:
    board = Board(problem, Clock(20.0))
    try:
        core = build(problem)[0]
        if route == "few rows" and problem.intervals is None and problem.groups is not None:  # as plans are
            search_few_rows(board, core, 0, tied_core(problem, core))
            return board.solution()
        reduce_core(core)
        if core.alive:
            rows_only = route == "few rows" and problem.intervals is None
            search_few_rows(board, core, 0) if rows_only else search_small(board, core, 0)
        else:
            return solve(problem, backend="milp")
    except Infeasible:
        board.infeasible = True
    return board.solution()


def disagreement(problem: Problem, reference: Solution, found: Solution, *, exact: bool) -> str | None:
    """What is wrong with `found`, given brute force's answer; None when nothing is. `exact`: it must be decided."""
    if reference.choice is None:
        if found.choice is not None:
            return f"a choice of cost {found.cost} where none is feasible"
        return f"{found.status} where nothing is feasible" if exact and found.status is not Status.INFEASIBLE else None
    slack = 1e-8 * max(1e-9, abs(reference.cost))
    if found.status is Status.INFEASIBLE:
        return f"infeasible, but there is a choice of cost {reference.cost}"
    if found.bound > reference.cost + slack:
        return f"bound {found.bound} above the optimum {reference.cost}"
    if found.choice is None:
        return f"nothing found ({found.status}), the optimum is {reference.cost}" if exact else None
    if evaluate(problem, found.choice) != found.cost:
        return f"cost {found.cost} of a choice that costs {evaluate(problem, found.choice)}"
    if found.cost < reference.cost - slack:
        return f"cost {found.cost} below the optimum {reference.cost}"
    if (exact or found.status is Status.OPTIMAL) and found.cost > reference.cost + slack:
        return f"cost {found.cost}, the optimum is {reference.cost} ({found.status})"
    if exact and found.status is not Status.OPTIMAL and found.cost - found.bound > 10 * slack:  # CP-SAT rounds costs to integers
        return f"{found.status}, cost {found.cost}, bound {found.bound}, optimum {reference.cost}"
    return None
