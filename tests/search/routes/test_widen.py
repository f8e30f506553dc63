"""What reductions at fixed prices removed can come back: no choice near the optimum is ruled out."""
from __future__ import annotations

import itertools
import math
from contextlib import suppress
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from autoshard.search import Board, Clock, Edge, Problem, evaluate, solve
from autoshard.search.problem import priced_cost
from autoshard.search.reductions import Infeasible, reduce_core
from autoshard.search.reductions.core import build
from autoshard.search.reductions.pairs import merge_pairs
from autoshard.search.routes.plans import search_few_rows
from autoshard.search.routes.priced import solve_priced
from autoshard.search.tie import tied_core
from tests.search.random_problems import random_problem

many = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
row_prices = st.just(0.0) | st.floats(1e-6, 1.0)  # a price of 1e-200 orders choices by less than a float holds of their cost


def all_costs(problem: Problem, prices: np.ndarray) -> dict[tuple[int, ...], float]:
    every = itertools.product(*(range(len(c)) for c in problem.node_costs))
    return {choice: priced_cost(problem, np.array(choice), prices) for choice in every}


@many
@given(seed=st.integers(0, 10**6), price=row_prices, room=st.sampled_from([0.0, 1e-3, 0.3, 2.0]))
def test_widen_keeps_every_choice_within_room_of_the_optimum(seed: int, price: float, room: float):
    problem = random_problem(seed, nodes=6, most=3)
    if problem.intervals is not None:
        return
    core = build(problem)[0]
    prices = np.where(np.isfinite(core.price), core.price, 1.0) * price
    costs = all_costs(problem, prices)
    least = min(costs.values())
    if not math.isfinite(least):
        return
    since = len(core.undo)
    free = core.copy()
    free.price_rows(prices)
    reduce_core(free)
    merge_pairs(free, 100)
    within = least + room * max(abs(least), 1e-9)
    masks = free.widen({v: np.ones(len(free.cost[v]), dtype=bool) for v in free.alive}, within - least, since)
    for choice, cost in costs.items():
        if cost <= within:
            part = core.project(np.array(choice))  # -1: a strategy that another one equals in every respect but its cost
            assert all(part[v] < 0 or masks[v][part[v]] for v in range(problem.n)), f"{choice} at {cost} was ruled out"


@many
@example(seed=230, price=0.0)  # a row that is over whatever is chosen, and nothing left to choose
@given(seed=st.integers(0, 10**6), price=row_prices)
def test_priced_bound_and_possible_strategies_hold(seed: int, price: float):
    problem = random_problem(seed, nodes=6, most=3)
    if problem.intervals is not None:
        return
    core = build(problem)[0]
    try:
        reduce_core(core)
    except Infeasible:
        return
    prices = np.where(np.isfinite(core.price), core.price, 1.0) * price
    always = (core.price == 0) & (problem.row_price > 0)
    costs = all_costs(problem, np.where(always, problem.row_price, prices))
    least = min(costs.values())
    priced = solve_priced(Board(problem, Clock(60.0)), core, prices, 0)
    slack = 1e-8 * max(abs(least), 1e-9)
    assert priced.bound <= least + slack
    assert priced.choice is None or abs(costs[tuple(priced.choice.tolist())] - priced.value) <= slack


def star() -> Problem:
    """A value, two readers and three copies, every copy on all three."""
    rng = np.random.default_rng(1)
    costs = (rng.random(3), rng.random(3), rng.random(3), *rng.random((3, 2)))
    every = (np.arange(3), np.arange(2))
    return Problem(costs, tuple(Edge(a, c, rng.random((3, 2)), *every) for c in (3, 4, 5) for a in (0, 1, 2)))


def test_a_pair_lets_its_copies_go():
    problem = star()
    least, core = solve(problem, backend="brute").cost, build(problem)[0]
    merge_pairs(core, 9)
    assert not core.alive and abs(core.constant - least) <= 1e-12
    assert evaluate(problem, core.lift(np.zeros(problem.n, dtype=np.int64))) == least


@pytest.mark.parametrize("seed", range(40))
def test_the_time_may_be_up_at_any_moment(seed: int):
    """Reductions then stop where they are, with forbidden strategies left in place."""
    problem = random_problem(seed, nodes=6)
    for looks in (1, 2, 3, 5, 8, 13, 21, 34, 55):
        clock = count()
        board = Board(replace(problem, intervals=None), Clock(float(looks), start=0.0, now=lambda clock=clock: float(next(clock))))
        core = build(board.problem)[0]
        with suppress(Infeasible):
            search_few_rows(board, core, 0, tied_core(board.problem, core))
        assert board.choice is None or board.bound <= board.cost + 1e-9 * abs(board.cost)
