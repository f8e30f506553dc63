"""The large route on problems made for it: a choice that fits comes first, from nothing, whatever memory is left."""
from __future__ import annotations

import numpy as np
import pytest

from autoshard.search import Board, Clock, Edge, Items, Problem, evaluate, solve
from autoshard.search.contest.read import parse_problem
from autoshard.search.reductions import reduce_core
from autoshard.search.reductions.core import build
from autoshard.search.routes.anneal import first_fitting, search_large
from tests.search.contest_problems import contest_problem


@pytest.mark.parametrize("tightness", [0.02, 0.2, 0.6])
def test_the_first_choice_fits_however_tight_memory_is(tightness: float):
    problem = parse_problem(contest_problem(3, nodes=80, tightness=tightness))
    board = Board(problem, Clock(60.0, work_limit=200_000))
    core = build(problem)[0]
    reduce_core(core)
    first_fitting(board, core, seed=0)
    assert board.choice is not None and evaluate(problem, board.choice) == board.cost < np.inf


def test_the_same_seed_and_work_limit_give_the_same_choice():
    problem = parse_problem(contest_problem(4, nodes=60))
    first, again = (solve(problem, backend="local", time_limit=60.0, work_limit=20_000, threads=1, seed=5) for _ in range(2))
    assert first.choice is not None and first.choice.tolist() == again.choice.tolist()
    assert (first.cost, first.bound) == (again.cost, again.bound)
    assert first.bound <= first.cost


def test_more_threads_than_starts_still_search():
    problem = parse_problem(contest_problem(5, nodes=40))
    found = solve(problem, backend="local", time_limit=60.0, work_limit=20_000, threads=12)
    assert found.choice is not None and evaluate(problem, found.choice) == found.cost


def test_a_priced_row_is_paid_and_not_avoided_at_any_cost():
    """Every node costs 10 without load, or 0 with load 1; a unit over the limit costs 3: loading all is best."""
    n, index = 6, np.arange(2)
    table = np.array([[0.0, 0.5], [0.5, 0.0]])
    edges = tuple(Edge(u, v, table, index, index) for v in range(n) for u in range(v))
    ones = np.ones(n)
    items = Items(np.arange(n), ones.astype(np.int64), np.zeros(n, dtype=np.int64), ones)
    problem = Problem((np.array([10.0, 0.0]),) * n, edges, np.array([1.0]), np.array([3.0]), items)
    board = Board(problem, Clock(60.0, work_limit=4000))
    search_large(board, build(problem)[0], 0, 1)
    assert board.cost == pytest.approx(15.0) and board.choice.tolist() == [1] * n
