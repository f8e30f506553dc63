"""Small problems as they are given: against brute force, with and without rows, and what is left to other routes."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autoshard.search import Clock, Edge, Items, Problem, prove, solve
from autoshard.search.board import Board
from autoshard.search.problem import Status
from autoshard.search.routes import as_given, auto
from tests.search.random_problems import layered_problem, random_problem


def searched(problem: Problem, start: np.ndarray | None = None, enough: float = 0.0) -> Board:
    board = Board(problem, Clock(60.0), enough=enough)
    if start is not None:
        board.offer(start)
    as_given.search_as_given(board)
    return board


@pytest.mark.parametrize("seeds", [range(start, start + 200) for start in (0, 200, 400)], ids=str)
def test_random_problems_against_brute_force(seeds: range) -> None:
    proven = []
    for seed in seeds:
        problem = replace(random_problem(seed), intervals=None)
        best, board = solve(problem, backend="brute"), searched(problem)
        tolerance = 1e-9 * max(1e-9, abs(best.cost)) if best.choice is not None else 0.0
        if best.choice is None:
            assert board.choice is None, f"seed {seed}"
            continue
        assert board.bound <= best.cost + tolerance, f"seed {seed}"
        assert board.cost >= best.cost - tolerance, f"seed {seed}"
        proven.append(board.proven)
    assert np.mean(proven) > 0.4, "the rest have rows that matter"


def test_layers_with_a_row_that_no_choice_fills() -> None:
    proven = []
    for seed in range(100):
        given = layered_problem(seed)
        problem = Problem(given.node_costs, given.edges, np.array([1e12]), np.array([np.inf]),
                          Items(np.arange(given.n), np.zeros(given.n, dtype=np.int64), np.zeros(given.n, dtype=np.int64), np.ones(given.n)))
        board, best = searched(problem), solve(problem, backend="milp")
        assert board.bound <= best.cost + 1e-9 * abs(best.cost)
        if best.choice is not None and board.proven:
            assert board.cost == pytest.approx(best.cost, rel=1e-9), f"seed {seed}"
        proven.append(best.choice is None or board.proven)
    assert np.mean(proven) > 0.2, "costs are random, which leaves messages a gap"


def ring(n: int, seed: int, strategies: int = 8) -> Problem:
    """Enough strategies that `solve` takes the problem as it is given."""
    rng, every = np.random.default_rng(seed), np.arange(strategies)
    edges = tuple(Edge(v, (v + 1) % n, rng.random((strategies, strategies)), every, every) for v in range(n))
    return Problem(tuple(rng.random(strategies) for _ in range(n)), edges)


def test_solve_takes_it_first_and_says_what_other_routes_say(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ring(150, 0)
    assert as_given.is_small(problem) and not as_given.is_small(ring(20, 0)) and not as_given.is_small(ring(9000, 0))
    with monkeypatch.context() as patch:
        patch.setattr(auto, "search_reduced", lambda *args: pytest.fail("the problem is solved before"))
        found = solve(problem)
    monkeypatch.setattr(auto, "is_small", lambda problem: False)
    other = solve(problem)
    assert found.status is other.status is Status.OPTIMAL and found.cost == pytest.approx(other.cost, rel=1e-12)


def test_rows_that_may_be_full_are_left_to_other_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    free = ring(150, 1)
    best = solve(free)
    items = Items(np.arange(150), best.choice, np.zeros(150, dtype=np.int64), np.ones(150))
    problem = Problem(free.node_costs, free.edges, np.array([149.0]), np.array([np.inf]), items)
    assert problem.fillable.tolist() == [True]
    monkeypatch.setattr(auto, "search_as_given", lambda board: pytest.fail("what fills no row is not asked"))
    tight = solve(problem)
    assert tight.status is Status.OPTIMAL and tight.cost > best.cost
    board = searched(problem)
    assert board.choice is None and board.bound == pytest.approx(best.cost, rel=1e-8), "asked all the same: a bound, no choice"


def test_what_excess_costs_is_seen() -> None:
    free = ring(150, 2)
    best = solve(free)
    items = Items(np.arange(150), best.choice, np.zeros(150, dtype=np.int64), np.ones(150))
    priced = Problem(free.node_costs, free.edges, np.array([0.0]), np.array([10.0]), items)
    board = searched(priced)
    assert not board.proven and board.cost > board.bound
    assert solve(priced).cost < best.cost + 1500.0, "other routes find what loads the row less"


def test_a_choice_near_the_optimum_ends_it_early() -> None:
    problem = ring(200, 3)
    best = solve(problem)
    near = best.choice.copy()
    near[7] = (near[7] + 1) % 8
    found = prove(problem, near, Clock(60.0), enough=0.5)
    assert found.gap <= 0.5 and found.bound <= best.cost * (1 + 1e-9)
    assert prove(problem, best.choice, Clock(60.0)).status is Status.OPTIMAL
    unknown = prove(ring(20, 3), np.zeros(20, dtype=np.int64), Clock(60.0))
    assert unknown.bound == -np.inf, "of a problem for other routes nothing is said"


def test_a_clock_that_is_over_ends_it() -> None:
    board = Board(ring(150, 4), Clock(0.0))
    as_given.search_as_given(board)
    assert board.choice is None and board.bound == -np.inf
