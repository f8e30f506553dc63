"""The problem at prices of its rows."""
from __future__ import annotations

import math

import numpy as np
import pytest

from autoshard.search import Board, Clock, Edge, Items, Problem, solve
from autoshard.search.reductions import settle_rows
from autoshard.search.reductions.core import build
from autoshard.search.routes.priced import _converged, solve_priced


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


class Sweeps:
    """Stands for a dual: its first sweeps pick strategy 5 of both nodes, and then dear strategies go; of what is left nothing is found."""

    def __init__(self, picks: bool) -> None:
        self.nodes, self.picks, self.ended = np.arange(2), picks, not picks

    def converge(self, phase, enough, upper=math.inf, rounds=0):
        return (1.0, np.array([5, 5]), 1.5) if self.picks else (1.0, np.array([0, 0]), math.inf)

    def without_dearer(self, upper):
        return Sweeps(picks=False)


def test_what_was_picked_before_dear_strategies_went_is_no_choice_of_what_is_left() -> None:
    """Its strategies have other numbers there, or none: reading them read memory of others."""
    board = Board(Problem((np.zeros(1), np.zeros(1)), ()), Clock(20.0))
    left, _, picked, value = _converged(board, Sweeps(picks=True), 0.0, 1.01)
    assert not left.picks and value == math.inf and (picked == -1).all()
