"""A choice made cheaper, neighbourhood by neighbourhood: never dearer, within the rows, and the optimum where one is the whole."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autoshard.search import Board, Clock, Edge, Problem, evaluate, improve, solve
from autoshard.search.problem import Items
from autoshard.search.routes import neighbourhoods
from tests.search.random_problems import random_problem


def connected(seed: int) -> Problem | None:
    """A random problem whose nodes all hang together, without time intervals; None where nothing is feasible. What is a group is no copy."""
    problem = replace(random_problem(seed), intervals=None, groups=None)
    links = tuple(Edge(v, v + 1, np.zeros((1, 1)), *(np.zeros(len(problem.node_costs[w]), dtype=np.int64) for w in (v, v + 1)))
                  for v in range(problem.n - 1))
    problem = replace(problem, edges=(*problem.edges, *links))
    return problem if solve(problem, backend="brute").choice is not None else None


def a_choice(problem: Problem, seed: int) -> np.ndarray:
    """Some feasible choice, seldom the best."""
    rng = np.random.default_rng(seed)
    drawn = (np.array([rng.integers(len(c)) for c in problem.node_costs]) for _ in range(200))
    return next((c for c in drawn if np.isfinite(evaluate(problem, c))), solve(problem, backend="brute").choice)


@pytest.mark.parametrize("start", range(0, 90, 30))
def test_a_neighbourhood_of_all_nodes_gives_the_optimum(start):
    better = 0
    for seed in range(start, start + 30):
        problem = connected(seed)
        if problem is None:
            continue
        first = a_choice(problem, seed)
        choice, cost = improve(problem, first, Clock(20.0))
        assert cost == evaluate(problem, choice)
        assert cost == pytest.approx(solve(problem, backend="brute").cost, rel=1e-9, abs=1e-12), seed
        better += cost < evaluate(problem, first)
    assert better > 5, "starts are seldom the best"


def test_small_neighbourhoods_never_make_it_dearer_nor_break_a_row():
    better = 0
    for seed in range(60):
        problem = replace(random_problem(seed, nodes=9, most=3), intervals=None)
        first = a_choice(problem, seed) if solve(problem).choice is not None else None
        if first is None:
            continue
        board = Board(problem, Clock(20.0))
        board.offer(first)
        neighbourhoods.improve(board, nodes=3)
        assert board.cost == evaluate(problem, board.choice) <= evaluate(problem, first), seed
        better += board.cost < evaluate(problem, first)
    assert better > 10


def test_copies_that_are_alike_stay_alike():
    """A chain of equal layers, each of two nodes: one of them is looked at."""
    rng = np.random.default_rng(0)
    inner, between, cost = rng.random((4, 4)), rng.random((4, 4)), rng.random(4)
    every = np.arange(4)
    edges = [Edge(2 * i, 2 * i + 1, inner, every, every) for i in range(6)] + [Edge(2 * i + 1, 2 * i + 2, between, every, every) for i in range(5)]
    problem = Problem((cost,) * 12, tuple(edges), groups=np.array([0, 1] * 6))
    choice, found = improve(problem, np.array([3, 3] * 6), Clock(20.0))
    assert len({tuple(pair) for pair in choice.reshape(-1, 2).tolist()}) == 1
    assert found < evaluate(problem, np.array([3, 3] * 6))


def test_what_is_not_feasible_is_no_start():
    problem = Problem((np.array([np.inf, 1.0]),))
    assert improve(problem, np.array([0]), Clock(5.0)) is None


def test_wide_neighbourhoods_gain_what_takes_many_changes_at_once():
    """A chain in which neighbours that differ cost 1, and every node saves 0.008 in the other state: only more than 125 nodes together gain."""
    every, differ = np.arange(2), np.array([[0.0, 1.0], [1.0, 0.0]])
    problem = Problem((np.array([0.008, 0.0]),) * 200, tuple(Edge(v, v + 1, differ, every, every) for v in range(199)))
    start = np.zeros(200, dtype=np.int64)
    assert improve(problem, start, Clock(20.0))[1] == evaluate(problem, start)
    assert improve(problem, start, Clock(20.0), wide=True)[1] == 0.0


def test_a_neighbourhood_whose_rows_bind_does_not_begin_with_itself_again():
    """Its bound is loose, so that the search for it would ask for neighbourhoods of its own choice, of which this one is the first. Whether it finds a
    cheaper choice in the seconds that it has depends on the machine: beside another job it may not."""
    rng, nodes, every = np.random.default_rng(0), 24, np.arange(12)
    pairs = {(v, v + 1) for v in range(nodes - 1)} | {tuple(sorted(rng.choice(nodes, 2, replace=False).tolist())) for _ in range(2 * nodes)}
    load = rng.random((nodes, 12))
    row = Items(np.repeat(np.arange(nodes), 12), np.tile(every, nodes), np.zeros(12 * nodes, dtype=np.int64), load.ravel())
    problem = Problem(tuple(rng.random((nodes, 12))), tuple(Edge(u, v, rng.random((12, 12)), every, every) for u, v in sorted(pairs)),
                      np.array([0.3 * nodes]), np.array([np.inf]), row)
    first = load.argmin(axis=1)
    choice, cost = improve(problem, first, Clock(20.0))
    assert cost == evaluate(problem, choice) <= evaluate(problem, first), "a plan found this way ended in a RecursionError"


def test_layers_change_together_where_no_neighbourhood_gains():
    """A chain in which neighbours that differ cost 1, and half of the nodes may take the dear load: two nodes that swap it gain nothing by themselves."""
    every, differ, count = np.arange(2), np.array([[0.0, 1.0], [1.0, 0.0]]), 24
    load = Items(np.arange(count), np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64), np.ones(count))
    problem = Problem((np.array([0.0, 0.1]),) * count, tuple(Edge(v, v + 1, differ, every, every) for v in range(count - 1)),
                      np.array([count / 2]), np.array([np.inf]), load, groups=np.zeros(count, dtype=np.int64))
    start = np.arange(count) % 2
    apart = replace(problem, groups=None)
    assert improve(problem, start, Clock(20.0))[1] == pytest.approx(1.0 + 0.1 * count / 2)
    board = Board(apart, Clock(20.0))
    board.offer(start)
    neighbourhoods.improve(board, nodes=2)
    assert board.cost > 2.0 + 0.1 * count / 2, "what the first line shows neighbourhoods do as well"
