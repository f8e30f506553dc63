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
    tied = tie(problem)
    assert tied.problem.n == 3 and tied.copies == 4
    for code in range(27):
        choice = np.array([code // 9, code // 3 % 3, code % 3])
        whole = evaluate(problem, tied.lift(choice))
        np.testing.assert_allclose(tied.copies * evaluate(tied.problem, choice), whole, rtol=1e-14)
    assert solve(problem).cost <= tied.copies * solve(tied.problem).cost + 1e-12


def test_a_layer_looks_the_same_in_the_quotient():
    """Presolve then does its work once for both."""
    rng = np.random.default_rng(3)
    costs, inside, between = (rng.random(3), rng.random(3)), rng.random((3, 3)), rng.random((3, 3))
    index, layers = np.arange(3), 5
    edges = tuple(Edge(2 * i, 2 * i + 1, inside, index, index) for i in range(layers))
    edges += tuple(Edge(2 * i + 1, 2 * i + 2, between, index, index) for i in range(layers - 1))
    items = Items(np.repeat(np.arange(layers), 1) * 2, np.ones(layers, dtype=np.int64), np.zeros(layers, dtype=np.int64), np.full(layers, 0.1))
    problem = Problem(costs * layers, edges, np.array([0.3]), np.array([2.0]), items, groups=np.array([0, 1] * layers))
    tied = tie(problem).problem
    assert tied.node_costs[0] is costs[0] and tied.node_costs[1] is costs[1]
    assert any(e.table is inside for e in tied.edges) and not any(e.table is between for e in tied.edges)
    assert tied.items.amount.tolist() == [0.1] and tied.row_limit.tolist() == [0.3 / layers]


def test_what_a_layer_does_all_may_do():
    """Two nodes a layer, the first of which the last layer lacks; node 5 is in no layer."""
    problem = Problem((np.zeros(9),) * 6, groups=np.array([0, 1, 0, 1, 1, -1]))
    each = [choice.tolist() for choice in tie(problem).spread(np.array([1, 2, 3, 4, 5, 6]))]
    assert each == [[1, 2, 1, 2, 2, 6], [3, 4, 3, 4, 4, 6], [3, 5, 3, 5, 5, 6]]
    assert len(tie(problem).spread(np.array([1, 2, 1, 2, 2, 6]))) == 1
