"""A problem solved at one price, guessed from choices near an optimum of a similar one."""
from __future__ import annotations

from dataclasses import replace

import numpy as np

from autoshard.search import Board, Clock, solve
from autoshard.search.reductions import Infeasible
from autoshard.search.reductions.core import build
from autoshard.search.routes.plans import solve_at_ends
from tests.search.random_problems import random_problem


def test_what_is_solved_is_the_optimum_and_bounds_are_bounds():
    solved = left = 0
    for seed in range(400):
        problem = random_problem(seed)
        best = solve(problem, backend="brute")
        if not len(problem.row_limit) or problem.intervals is not None or best.choice is None:
            continue
        similar = solve(replace(problem, node_costs=tuple(1.1 * c for c in problem.node_costs)), backend="brute").choice
        board = Board(problem, Clock(20.0), near=[similar])
        core, _ = build(problem)
        try:
            done = solve_at_ends(board, core, 0)
        except Infeasible:
            raise AssertionError(f"seed {seed}: a choice was lost") from None
        assert board.bound <= best.cost + 1e-9 * abs(best.cost), seed
        assert not done or board.cost <= best.cost + 1e-9 * abs(best.cost), seed
        solved, left = solved + done, left + (not done)
        if done:
            assert any(np.array_equal(board.choice, c) for c in board.near), "it is left for the next problem"
    assert solved > 40 and left > 10
