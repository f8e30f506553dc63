"""Whether any choice keeps the rows is found out early: prices that grow without end prove nothing for long."""
from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from autoshard.search.board import Board
from autoshard.search.clock import Clock
from autoshard.search.problem import Items, Problem, evaluate, row_loads
from autoshard.search.reductions import Infeasible
from autoshard.search.reductions.core import build
from autoshard.search.routes.keeping import most_cost, steep_prices
from autoshard.search.routes.prices import search_prices
from tests.search.random_problems import random_problem


def two_rows(limit: float) -> Problem:
    """Four nodes that load one row or the other with 1: each row alone can stay empty, and together they hold 4."""
    costs = tuple(np.array([1.0, 2.0 + n]) for n in range(4))
    node, strategy = np.repeat(np.arange(4), 2), np.tile([0, 1], 4)
    return Problem(costs, (), np.full(2, limit), np.full(2, np.inf), Items(node, strategy, strategy, np.ones(8)))


def every_choice(problem: Problem) -> list[np.ndarray]:
    return [np.array(choice) for choice in product(*(range(len(c)) for c in problem.node_costs))]


@pytest.mark.parametrize("seed", range(40))
def test_no_choice_costs_more_than_the_most(seed):
    problem = random_problem(seed, nodes=4, most=3)
    alone = Problem(problem.node_costs, problem.edges)
    assert all(cost <= most_cost(problem) * (1 + 1e-12) for c in every_choice(alone) if np.isfinite(cost := evaluate(alone, c)))


def test_steep_prices_charge_every_mixture_of_the_choices():
    problem, rows = two_rows(1.5), np.ones(2, dtype=bool)
    choices = [np.zeros(4, dtype=int), np.ones(4, dtype=int)]
    prices = steep_prices(problem, rows, choices)
    excess = [row_loads(problem, c) - problem.row_limit for c in choices]
    assert prices is not None and all(np.dot(prices, e) > most_cost(problem) for e in excess)
    assert steep_prices(two_rows(2.5), rows, choices) is None, "half of each keeps both rows"
    assert steep_prices(problem, np.zeros(2, dtype=bool), choices) is None


def test_a_row_that_nothing_may_load():
    problem = two_rows(0.0)
    prices = steep_prices(problem, np.ones(2, dtype=bool), [np.zeros(4, dtype=int)])
    assert prices is not None and prices[0] > 0.0 and np.isfinite(prices).all()
    assert steep_prices(two_rows(4.0), np.ones(2, dtype=bool), [np.zeros(4, dtype=int)]) is None


def asked(problem: Problem, monkeypatch) -> tuple[Board, list[np.ndarray]]:
    from autoshard.search.routes import prices

    log, solve_priced = [], prices.solve_priced
    monkeypatch.setattr(prices, "solve_priced", lambda board, core, at, *rest, **more: log.append(at) or solve_priced(board, core, at, *rest, **more))
    return Board(problem, Clock(20.0)), log


def test_rows_that_no_choice_keeps_are_told_after_few_answers(monkeypatch):
    """Rows of 1.9 and 1.9 for loads of 4 in all: prices that rise by parts of the bound would go on for all of the trials."""
    problem = two_rows(1.9)
    board, log = asked(problem, monkeypatch)
    with pytest.raises(Infeasible, match="over some row"):
        search_prices(board, build(problem)[0], [], 0)
    assert len(log) <= 4 and all(row_loads(problem, c).max() > 1.9 for c in every_choice(problem))


def test_where_it_is_doubtful_it_is_asked_first(monkeypatch):
    problem = two_rows(1.9)
    board, log = asked(problem, monkeypatch)
    board.near = [np.zeros(4, dtype=int), np.ones(4, dtype=int)]
    with pytest.raises(Infeasible):
        search_prices(board, build(problem)[0], [], 0, doubtful=True)
    assert len(log) == 1


def test_rows_that_some_choice_keeps_are_kept(monkeypatch):
    problem = two_rows(2.0)
    board, _ = asked(problem, monkeypatch)
    best, _, _ = search_prices(board, build(problem)[0], [], 0)
    cheapest = min(evaluate(problem, c) for c in every_choice(problem))
    assert best is not None and best.bound <= cheapest * (1 + 1e-9) and board.choice is not None
