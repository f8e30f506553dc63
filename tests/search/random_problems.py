"""Small random problems that reach every reduction: forbidden pairs, ties, shared index vectors, rows, intervals."""
from __future__ import annotations

import numpy as np

from autoshard.search import Edge, Intervals, Items, Problem


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
    return Problem(tuple(_some_finite(rng, draw(k)) for k in sizes), tuple(edges), limit, price, items,
                   _intervals(rng, n, sizes) if rng.random() < 0.5 else None)


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
