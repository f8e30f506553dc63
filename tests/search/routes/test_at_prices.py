"""Problems of middle size at a few prices of their rows: valid bounds, and choices near them."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autoshard.search import Clock, Edge, Items, Problem, solve
from autoshard.search.board import Board
from autoshard.search.routes import at_prices, auto
from autoshard.search.routes.at_prices import search_at_prices
from tests.search.random_problems import random_problem


def searched(problem: Problem) -> Board:
    board = Board(problem, Clock(60.0))
    search_at_prices(board, 0)
    return board


@pytest.mark.parametrize("seeds", [range(start, start + 100) for start in (0, 100, 200)], ids=str)
def test_random_problems_against_brute_force(seeds: range) -> None:
    met = 0
    for seed in seeds:
        given = random_problem(seed)
        problem = replace(given, intervals=None, row_price=np.where(np.isinf(given.row_price), 3.0, given.row_price))
        best, board = solve(problem, backend="brute"), searched(problem)
        if best.choice is None:
            assert board.choice is None, f"seed {seed}"
            continue
        tolerance = 1e-9 * max(1e-9, abs(best.cost))
        assert board.bound <= best.cost + tolerance and board.cost >= best.cost - tolerance, f"seed {seed}"
        met += board.cost <= best.cost + tolerance
    assert met > 50, "often the optimum is among what is found"


def competing(n: int, seed: int) -> Problem:
    """Each node may load a priced row or spend more itself; neighbours like to agree."""
    rng, every = np.random.default_rng(seed), np.arange(8)
    costs = tuple(np.sort(rng.random(8)) for _ in range(n))
    edges = tuple(Edge(v, v + 1, 0.2 * rng.random((8, 8)), every, every) for v in range(n - 1))
    node, strategy = np.repeat(np.arange(n), 8), np.tile(every, n)
    amount = np.concatenate([np.linspace(1.0, 0.0, 8) * rng.random() for _ in range(n)])
    items = Items(node, strategy, np.zeros(8 * n, dtype=np.int64), amount)
    return Problem(costs, edges, np.array([0.1 * n]), np.array([2.0]), items)


def test_rows_that_matter_are_priced_and_the_rest_goes_on_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = competing(150, 0)
    board = searched(problem)
    assert board.gap < 0.01 and len(board.near) > 1
    best = solve(problem)
    assert best.cost <= board.cost and board.bound <= best.cost * (1 + 1e-9)
    monkeypatch.setattr(auto, "is_small", lambda problem: False)
    monkeypatch.setattr(auto, "is_middling", lambda problem: False)
    alone = solve(problem)
    assert alone.cost == pytest.approx(best.cost, rel=1e-3) and alone.bound <= best.cost * (1 + 1e-9) and best.bound <= alone.cost * (1 + 1e-9)


def test_without_priced_rows_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_prices, "minimise", lambda *args: pytest.fail("there is one price, which others ask"))
    free = competing(20, 1)
    assert searched(Problem(free.node_costs, free.edges)).bound == -np.inf


def test_items_on_one_node_add_up() -> None:
    problem = Problem((np.zeros(2), np.zeros(3)), (), np.array([1.0, 5.0]), np.array([1.0, 2.0]),
                      Items(np.array([1, 0, 1, 1]), np.array([2, 1, 2, 0]), np.array([0, 0, 1, 1]), np.array([3.0, 4.0, 5.0, 6.0])))
    free = at_prices._without_rows(problem, np.array([0.5, 2.0]))
    assert [cost.tolist() for cost in free.node_costs] == [[0.0, 2.0], [12.0, 0.0, 11.5]]
