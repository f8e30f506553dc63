"""Minimising without a MIP: against brute force, on trees exactly, with a bound that holds where it is not exact."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autoshard.search import Clock, Edge, Items, Problem, Status, evaluate, solve
from autoshard.search.routes import min_sum
from tests.search.random_problems import random_problem


def without_rows(problem: Problem) -> Problem:
    return replace(problem, row_limit=np.zeros(0), row_price=np.zeros(0), items=Items.empty(), intervals=None)


@pytest.mark.parametrize("start", range(0, 400, 100))
def test_random_problems_against_brute_force(start):
    for seed in range(start, start + 100):
        problem = without_rows(random_problem(seed))
        best, found = solve(problem, backend="brute"), min_sum.minimise(problem)
        if best.choice is None:
            assert found.choice is None, seed
            continue
        assert found.choice is not None, seed
        assert found.cost == evaluate(problem, found.choice)
        assert found.bound <= best.cost * (1 + 1e-9) + 1e-12 and best.cost <= found.cost * (1 + 1e-9) + 1e-12, seed
        if found.status is Status.OPTIMAL:
            assert found.cost == pytest.approx(best.cost, rel=1e-9), seed


def test_trees_are_exact():
    rng = np.random.default_rng(1)
    for _ in range(5):
        sizes = rng.integers(2, 9, 60)
        edges = [Edge(int(rng.integers(v)), v, np.zeros(0), np.zeros(0), np.zeros(0)) for v in range(1, 60)]
        edges = [replace(e, table=rng.random((sizes[e.u], sizes[e.v])), rows=np.arange(sizes[e.u]), cols=np.arange(sizes[e.v]))
                 for e in edges]
        problem = Problem(tuple(rng.random(k) for k in sizes), tuple(edges))
        found = min_sum.minimise(problem)
        assert found.status is Status.OPTIMAL
        assert found.cost == pytest.approx(solve(problem, backend="milp").cost, rel=1e-9)


def grid(side: int, seed: int, groups: np.ndarray | None = None) -> Problem:
    """Nodes on a grid with random tables: no elimination of small width solves it."""
    rng = np.random.default_rng(seed)
    table = {k: rng.random((4, 4)) for k in ("across", "down")}
    every = np.arange(4)
    number = np.arange(side * side).reshape(side, side)
    edges = [Edge(int(a), int(b), table["across"], every, every) for a, b in zip(number[:, :-1].ravel(), number[:, 1:].ravel())]
    edges += [Edge(int(a), int(b), table["down"], every, every) for a, b in zip(number[:-1].ravel(), number[1:].ravel())]
    costs = tuple(0.1 * rng.random(4) for _ in range(side * side)) if groups is None else (0.1 * rng.random(4),) * (side * side)
    return Problem(costs, tuple(edges), groups=groups)


def test_what_is_no_tree_is_swept_and_never_dearer_than_what_was_known():
    problem = grid(12, 3)
    known = np.zeros(problem.n, dtype=np.int64)
    found = min_sum.minimise(problem, [known])
    best = solve(problem, time_limit=20)
    assert best.bound * (1 - 1e-9) <= found.cost <= evaluate(problem, known)
    assert found.bound <= best.cost * (1 + 1e-9)
    assert found.cost <= 1.05 * best.cost


def test_a_large_problem_is_answered_with_equal_layers_tied(monkeypatch):
    monkeypatch.setattr(min_sum, "LARGE", 100)
    side = 12
    problem = grid(side, 5, groups=np.tile(np.arange(side), side))
    found = min_sum.minimise(problem)
    assert found.choice is not None and found.status is not Status.OPTIMAL and found.bound == -np.inf
    assert (found.choice.reshape(side, side) == found.choice[:side]).all(), "rows alike"


def test_nothing_is_possible():
    table = np.full((2, 2), np.inf)
    problem = Problem((np.zeros(2), np.zeros(2)), (Edge(0, 1, table, np.arange(2), np.arange(2)),))
    assert min_sum.minimise(problem).status is Status.INFEASIBLE


def test_the_first_pairs_may_be_the_widest_and_a_clock_of_another_ends_it():
    problem = grid(8, 4)
    known = np.zeros(problem.n, dtype=np.int64)
    best = min_sum.minimise(problem, [known])
    wide = min_sum.minimise(problem, [known], pairs=min_sum.PAIRS[-1:])
    assert wide.bound <= best.cost * (1 + 1e-9) and best.bound <= wide.cost * (1 + 1e-9) and wide.cost < evaluate(problem, known)
    over = Clock(60.0)
    over.stop = True
    stopped = min_sum.minimise(problem, [known], over.part())
    assert stopped.status is Status.INTERRUPTED and np.isfinite(stopped.cost)
