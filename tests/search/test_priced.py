"""The problem at prices of its rows."""
from __future__ import annotations

import numpy as np
import pytest

from autoshard.search import Board, Clock, Edge, Items, Problem, solve
from autoshard.search.reductions import settle_rows
from autoshard.search.reductions.core import build
from autoshard.search.routes.priced import solve_priced


def test_a_price_of_a_row_that_became_part_of_the_costs_is_not_charged_again():
    """Row 0 is over its limit whatever is chosen, so its price is in the costs; row 1 never binds."""
    rng, every = np.random.default_rng(0), np.arange(3)
    edges = tuple(Edge(u, v, rng.random((3, 3)), every, every) for v in range(5) for u in range(v))
    node, strategy = (x.ravel() for x in np.meshgrid(np.arange(5), every, indexing="ij"))
    row = np.repeat([0, 1], len(node))
    items = Items(np.tile(node, 2), np.tile(strategy, 2), row, 1.0 + rng.random(2 * len(node)))
    problem = Problem(tuple(rng.random(3) for _ in range(5)), edges, np.array([2.0, 50.0]), np.array([0.7, 0.4]), items)
    best = solve(problem, backend="brute").cost
    core = build(problem)[0]
    settle_rows(core)
    assert core.price.tolist() == [0.0, 0.4]
    priced = solve_priced(Board(problem, Clock(20.0)), core, np.array([0.7, 0.0]), 0)
    assert priced.bound == pytest.approx(best, rel=1e-9) and priced.value == pytest.approx(best, rel=1e-9)
