"""Nodes minimised out one after the other give the optimum at fixed prices, and exactly the strategies of choices near it."""
from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoshard.search import Board, Clock, evaluate
from autoshard.search.problem import priced_cost
from autoshard.search.reductions import Infeasible, reduce_core
from autoshard.search.reductions.core import build
from autoshard.search.routes import bucket_elimination
from autoshard.search.routes.bucket_elimination import Elimination
from autoshard.search.routes.priced import solve_priced
from tests.search.random_problems import random_problem

many = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@many
@given(seed=st.integers(0, 10**6), price=st.just(0.0) | st.floats(1e-6, 1.0), room=st.sampled_from([0.0, 1e-3, 0.3, 2.0]), reduced=st.booleans())
def test_the_least_cost_and_who_may_take_part_in_it_are_those_of_all_choices(seed: int, price: float, room: float, reduced: bool):
    problem = random_problem(seed, nodes=6, most=3)
    if problem.intervals is not None:
        return
    core = build(problem)[0]
    prices = np.where(np.isfinite(core.price), core.price, 1.0) * price
    if reduced:
        try:
            reduce_core(core)
        except Infeasible:
            return
    order, board = Elimination.of(core), Board(problem, Clock(20.0))
    assert order is not None, "six nodes make no large table"
    charged = np.where((core.price == 0) & (problem.row_price > 0), problem.row_price, np.minimum(prices, core.price))
    every = list(itertools.product(*(range(len(c)) for c in problem.node_costs)))
    costs = {choice: priced_cost(problem, np.array(choice), charged) for choice in every}
    least = min(costs.values())
    if not math.isfinite(least):
        with pytest.raises(Infeasible):
            solve_priced(board, core, prices, 0, order=order)
        return
    answer = solve_priced(board, core, prices, 0, order=order)
    if reduced:  # what is left has one of the best choices within the rows
        assert answer.bound <= min(evaluate(problem, np.array(choice)) for choice in every) * (1 + 1e-9)
        return
    assert answer.choice is not None and answer.value == pytest.approx(answer.bound, rel=1e-9, abs=1e-9), "the choice costs what is proven"
    assert answer.bound == pytest.approx(least, rel=1e-9, abs=1e-9)
    within = least + room * max(abs(least), 1e-9)
    near = [core.project(np.array(choice)) for choice, cost in costs.items() if cost <= within]
    masks = answer.possible(within)
    for v in core.alive:
        told_apart = {int(part[v]) for part in near} - {-1}  # -1: a strategy that another one equals in every respect but its cost
        assert told_apart <= set(np.flatnonzero(masks[v]).tolist())
        surely = {int(part[v]) for part in (core.project(np.array(c)) for c, cost in costs.items() if cost <= within - 1e-9) if (part >= 0).all()}
        loosely = {int(part[v]) for part in (core.project(np.array(c)) for c, cost in costs.items() if cost <= within + 1e-6)} - {-1}
        assert surely <= set(np.flatnonzero(masks[v]).tolist()) <= loosely, "none but those of choices near the optimum"


def test_large_tables_are_left_to_sweeps(monkeypatch: pytest.MonkeyPatch):
    problem = next(p for seed in itertools.count() if (p := random_problem(seed, nodes=12, most=4)).intervals is None and len(p.edges) > 20)
    core = build(problem)[0]
    whole = Elimination.of(core)
    assert whole is not None
    entries = sum(bucket.edges.size for bucket in whole.buckets)
    monkeypatch.setattr(bucket_elimination, "MOST_ENTRIES", entries)
    assert Elimination.of(core) is not None
    monkeypatch.setattr(bucket_elimination, "MOST_ENTRIES", entries - 1)
    assert Elimination.of(core) is None
