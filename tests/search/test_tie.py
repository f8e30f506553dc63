"""Tying repeated layers: the quotient's cost is the cost of the lifted choice."""
from __future__ import annotations

import numpy as np

from autoshard.search import Edge, Items, Problem, evaluate, solve
from autoshard.search.tie import tie


def chain(layers: int) -> Problem:
    rng = np.random.default_rng(5)
    cost, table = rng.random(3), rng.random((3, 3))
    index = np.arange(3)
    edges = tuple(Edge(i, i + 1, table, index, index) for i in range(layers - 1))
    items = Items(np.arange(layers), np.zeros(layers, dtype=np.int64), np.zeros(layers, dtype=np.int64), np.ones(layers))
    groups = np.array([-1, *[0] * (layers - 2), -1])
    return Problem((cost,) * layers, edges, np.array([2.0]), np.array([np.inf]), items, groups=groups)


def test_quotient_prices_what_it_lifts_to():
    problem = chain(6)
    quotient, lift = tie(problem)
    assert quotient.n == 3
    for code in range(27):
        choice = np.array([code // 9, code // 3 % 3, code % 3])
        assert np.isclose(evaluate(quotient, choice), evaluate(problem, lift(choice)), equal_nan=True) or \
            evaluate(quotient, choice) == evaluate(problem, lift(choice)) == np.inf
    assert solve(problem).cost <= solve(quotient).cost + 1e-12
