"""The proof in whole numbers: it finds what is there, refutes what is not, and stays out of what is not whole."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autoshard.search import Board, Clock, Intervals, Problem, evaluate, solve
from autoshard.search.contest.read import parse_problem
from autoshard.search.dual.proof import Prover, confirm, exact_grid
from autoshard.search.reductions.core import build
from tests.search.contest_problems import contest_problem
from tests.search.random_problems import random_problem


def prover(problem: Problem) -> Prover:
    grid = exact_grid(problem)
    assert grid is not None, "the problem is in whole numbers"
    return Prover(grid, lambda: False)


def test_random_whole_problems_against_brute_force():
    proven = infeasible = 0
    for seed in range(400):
        problem = random_problem(seed)
        if not Board(problem, Clock(1.0)).integral:
            continue
        reference, core = solve(problem, backend="brute"), build(problem)[0]
        if reference.choice is None:
            assert prover(problem).search(core, 1e7) is None, f"seed {seed}: a choice where none is feasible"
            infeasible += 1
            continue
        found = prover(problem).search(core.copy(), reference.cost)
        assert found is not None and evaluate(problem, found) == reference.cost, f"seed {seed}: the optimum was lost"
        assert prover(problem).search(core, reference.cost - 1) is None, f"seed {seed}: cheaper than the optimum"
        proven += 1
    assert proven > 30 and infeasible > 10


@pytest.mark.parametrize("seed", range(3))
def test_a_problem_with_binding_memory_is_solved_and_refuted(seed: int):
    problem = parse_problem(contest_problem(seed, nodes=12, strategies=5, degree=2))
    best = solve(problem)
    assert best.stats["exact"] and best.cost == best.bound
    checker = prover(problem)
    assert checker.search(build(problem)[0], best.cost - 1) is None and checker.branches >= 1
    found = checker.search(build(problem)[0], best.cost + 50)
    assert found is not None and best.cost <= evaluate(problem, found) <= best.cost + 50


def test_a_dearer_choice_is_not_confirmed_but_replaced():
    problem = parse_problem(contest_problem(1, nodes=10, strategies=4, degree=2))
    best = solve(problem)
    rng, board = np.random.default_rng(0), Board(problem, Clock(60.0))
    while board.choice is None or board.cost == best.cost:
        board.offer(rng.integers(0, 4, 10))
    assert confirm(board) and board.cost == best.cost


def test_fractions_and_large_numbers_are_left_to_the_margin():
    whole = Problem((np.array([1.0, 2.0]),))
    assert exact_grid(whole) is not None
    times = Intervals(4.0, *np.zeros((2, 1), dtype=np.int64), np.array([0]), np.array([2]), np.array([1.5]))
    assert exact_grid(replace(whole, intervals=times)) is None
    assert exact_grid(Problem((np.array([1.0, 2.0**52]),))) is None
    assert "exact" not in solve(Problem((np.array([1.5, 2.0]),))).stats


def test_the_time_limit_ends_a_proof():
    problem = parse_problem(contest_problem(1, nodes=10, strategies=4, degree=2))
    board = Board(problem, Clock(0.0))
    board.offer(solve(problem).choice)
    assert not confirm(board)
