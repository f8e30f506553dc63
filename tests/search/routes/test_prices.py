"""Prices of rows: which to ask next."""
from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from autoshard.search.board import Board
from autoshard.search.clock import Clock
from autoshard.search.problem import Items, Problem
from autoshard.search.reductions.core import build
from autoshard.search.routes.priced import solve_priced
from autoshard.search.routes.prices import FAR, STRIDE, next_prices, planes_of, search_prices


def core_with(*price: float) -> SimpleNamespace:
    return SimpleNamespace(price=np.array(price), limit=np.full(len(price), 100.0))


def answered(bound: float, *prices: float) -> SimpleNamespace:
    return SimpleNamespace(bound=bound, value=bound, choice=np.zeros(1), prices=np.array(prices))


def test_a_promise_far_above_the_bound_is_approached_in_steps() -> None:
    """One plane that rises with the price of a hard row promises what the largest price does; asked is the price that promises a tenth more."""
    planes = [(np.zeros(1), 10.0, np.array([50.0]))]
    highest, promised = next_prices(core_with(np.inf), planes)
    assert promised > 10.0 * (1 + STRIDE)
    prices, still = next_prices(core_with(np.inf), planes, answered(10.0, 0.0))
    assert still == promised and prices[0] < highest[0]
    assert 10.0 + 50.0 * prices[0] == pytest.approx(10.0 * (1 + STRIDE))


def test_of_prices_that_promise_enough_the_nearest_is_asked() -> None:
    """Two rows of one slope: the one whose price is a larger share of what it may be is changed least."""
    planes = [(np.zeros(2), 10.0, np.array([1.0, 4.0]))]
    prices, promised = next_prices(core_with(0.5, 0.5), planes, answered(10.0, 0.25, 0.0))
    assert promised == pytest.approx(12.5)
    assert prices == pytest.approx([0.25, 0.1875])  # 11 is promised: 0.25 x 1 + 0.1875 x 4


def test_a_promise_near_the_bound_is_asked_as_it_is() -> None:
    planes = [(np.zeros(1), 10.0, np.array([1.0])), (np.ones(1), 10.0, np.array([-1.0]))]
    prices, promised = next_prices(core_with(1.0), planes, answered(promised_within(10.5), 0.0))
    assert prices == pytest.approx([0.5]) and promised == pytest.approx(10.5)


def test_a_step_begins_at_what_the_last_answer_costs_where_its_bound_is_below() -> None:
    """Else half of the way may end where the last answer was, answer after answer."""
    planes = [(np.zeros(1), 10.0, np.array([1.0]))]
    best = answered(9.5, 0.5)
    best.value = 10.5  # of the plane, at these prices
    prices, promised = next_prices(core_with(1.0), planes, best)
    assert promised == pytest.approx(11.0) and prices == pytest.approx([0.75])


def promised_within(height: float) -> float:
    """A bound from which `height` is no step."""
    return height / (1 + FAR / 2)


def test_a_small_problem_near_zero_takes_few_answers(monkeypatch) -> None:
    """One node: free and one too many for a row of price 4, or dear and none. At the first price the bound is 0, of which no part is a step."""
    problem = Problem((np.array([0.0, 1.0]),), (), np.array([0.5]), np.array([4.0]), Items(np.array([0]), np.array([0]), np.array([0]), np.array([1.0])))
    asked: list[float] = []

    def answer(board, core, prices, *rest, **more):
        asked.append(float(prices[0]))
        return solve_priced(board, core, prices, *rest, **more)

    monkeypatch.setattr("autoshard.search.routes.prices.solve_priced", answer)
    best, _, _ = search_prices(Board(problem, Clock(20.0)), build(problem)[0], [], 0)
    assert best is not None and best.bound == pytest.approx(0.5) and asked == pytest.approx([2.0, 0.0, 1.0])


def test_rows_that_no_choice_known_limits_begin_without_a_price(monkeypatch) -> None:
    """A choice near the optimum exceeds a hard row by a little. Its plane alone promises most at the largest price, at which the bound is far
    below what it is without any: the first answer is there."""
    problem = Problem((np.array([10.0, 11.0]),), (), np.array([0.9]), np.array([np.inf]), Items(np.array([0]), np.array([0]), np.array([0]), np.array([1.0])))
    asked: list[float] = []

    def answer(board, core, prices, *rest, **more):
        asked.append(float(prices[0]))
        return solve_priced(board, core, prices, *rest, **more)

    monkeypatch.setattr("autoshard.search.routes.prices.solve_priced", answer)
    board = Board(problem, Clock(20.0))
    board.near = [np.array([0])]
    core = build(problem)[0]
    planes = planes_of(board, core)
    assert next_prices(core, planes)[0][0] > 10.0, "what the plane says"
    best, _, _ = search_prices(board, core, planes, 0)
    assert asked[0] == 0.0 and best is not None and best.bound >= 10.0 * (1 - 1e-9)
