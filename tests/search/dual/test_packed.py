"""The order of sweeps, and tables whose equal rows are stored once."""
from __future__ import annotations

import numpy as np
import pytest

from autoshard.search import Board, Clock, Edge, Problem, evaluate, solve
from autoshard.search.clock import Phase
from autoshard.search.dual import messages
from autoshard.search.dual.dual import Dual
from autoshard.search.dual.packed import along, pack
from autoshard.search.reductions.core import build
from autoshard.search.routes.milp import solve_mip
from autoshard.search.routes.priced import _converged


def test_sweeps_go_along_a_chain_from_an_end_whatever_its_numbers():
    numbers, every = [3, 0, 5, 1, 4, 2], np.arange(2)
    edges = tuple(Edge(u, v, np.array([[0.0, 1.0], [2.0, 4.0]]), every, every) for u, v in zip(numbers, numbers[1:], strict=False))
    core = build(Problem((np.array([1.0, 2.0]),) * 8, edges))[0]  # nodes 6 and 7 stand alone
    order = along(core)
    assert order[:-2] in (numbers, numbers[::-1])
    assert sorted(order) == core.alive == list(range(8))
    packed, nodes, _ = pack(core, order)
    assert nodes.tolist() == order and len(packed.cost) == sum(len(core.cost[v]) for v in order)


def test_nothing_is_in_no_order():
    assert along(build(Problem(()))[0]) == []


def repeating(seed: int) -> Problem:
    """A ring of nodes with 30 to 60 strategies, of which a neighbour tells 3 to 9 apart, some never together; and one edge without equal rows."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(30, 60, size=6)
    edges = []
    for u in range(6):
        v, kinds = (u + 1) % 6, rng.integers(3, 9, size=2)
        table = rng.random(kinds)
        table[rng.random(table.shape) < 0.2] = np.inf
        table[0] = table[:, 0] = 1.0  # every strategy has a partner
        edges.append(Edge(u, v, table, rng.integers(0, kinds[0], size=sizes[u]), rng.integers(0, kinds[1], size=sizes[v])))
    edges.append(Edge(0, 3, rng.random((sizes[0], sizes[3])), np.arange(sizes[0]), np.arange(sizes[3])))
    return Problem(tuple(rng.random(n) for n in sizes), tuple(edges))


@pytest.mark.parametrize("seed", range(8))
def test_equal_rows_stored_once_change_no_message_and_no_bound(seed):
    core = build(repeating(seed))[0]
    plain, once = Dual(core), Dual(core, alike=True)
    assert len(once.packed.table) < len(plain.packed.table)
    for dual in (plain, once):
        messages.sweep_ahead(dual.packed, dual.message, dual.before, dual.pace, np.empty_like(dual.packed.cost), 7)
    assert np.array_equal(plain.message, once.message)
    found = [dual.converge(Phase(Clock(20.0), 1.0)) for dual in (plain, once)]
    assert found[0][0] == found[1][0] and found[0][2] == found[1][2] and np.array_equal(found[0][1], found[1][1])
    upper = found[0][2]
    assert all(np.array_equal(a, b) for a, b in zip(plain.possible(upper).values(), once.possible(upper).values(), strict=True))


def test_a_choice_costs_what_the_problem_says():
    problem = repeating(3)
    dual, rng = Dual(build(problem)[0], alike=True), np.random.default_rng(0)
    for _ in range(50):
        choice = np.array([rng.integers(len(dual.core.cost[v])) for v in dual.nodes])
        assert messages.total_cost(dual.packed, choice) + dual.core.constant == pytest.approx(evaluate(problem, dual.core.lift(choice)))


@pytest.mark.parametrize("seed", range(8))
def test_what_is_left_of_strategies_that_are_not_too_dear_has_the_best_choice_and_its_messages(seed):
    problem = repeating(seed)
    core = build(problem)[0]
    best = solve(problem, backend="milp").cost
    dual = Dual(core, alike=True)
    before = dual.converge(Phase(Clock(20.0), 1.0), rounds=3)[0]
    left = dual.without_dearer(best + 0.02)
    assert left is not None and len(left.packed.cost) < 0.7 * len(dual.packed.cost)
    after, picked, value = left.converge(Phase(Clock(20.0), 1.0), rounds=3)
    assert before <= after <= best + 1e-9 and solve_mip(left.core, 20.0).bound == pytest.approx(best)
    full = np.zeros(problem.n, dtype=np.int64)
    full[left.nodes] = picked
    assert evaluate(problem, left.core.lift(full)) == pytest.approx(value)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("known", (0.0, 0.01, 0.05, np.inf))
def test_a_known_cost_changes_no_proof(seed, known):
    problem = repeating(seed)
    best = solve(problem, backend="milp").cost
    board = Board(problem, Clock(20.0))
    bound, value = _converged(board, Dual(build(problem)[0], alike=True), 0.0, best + known)[1::2]
    whole = Dual(build(problem)[0]).converge(Phase(Clock(20.0), 1.0))[0]
    assert whole - 1e-6 * best <= bound <= best + 1e-9 and value >= best - 1e-9


def test_a_strategy_whose_partners_are_too_dear_goes_with_them():
    """It would get an infinite message, and infinite less infinite is nothing: not a cost, and not a bound."""
    every, free = np.arange(4), np.zeros((4, 4))
    only = np.where(np.eye(4) > 0, 0.0, np.inf)  # the strategies of 0 and 1 are partners one by one
    problem = Problem((np.zeros(4), np.array([0.0, 5.0, 6.0, 7.0]), np.array([0.0, 0.1, 8.0, 9.0])),
                      (Edge(0, 1, only, every, every), Edge(1, 2, free, every, every), Edge(0, 2, np.arange(16.0).reshape(4, 4) % 3, every, every)))
    dual = Dual(build(problem)[0])
    dual.converge(Phase(Clock(20.0), 1.0), rounds=1)
    dual.possible = lambda upper: {0: np.ones(4, dtype=bool), 1: every < 1, 2: every < 2}  # as rounding may leave them
    left = dual.without_dearer(1.0)
    assert left is not None and [len(left.core.cost[v]) for v in (0, 1, 2)] == [1, 1, 2]
    with np.errstate(invalid="raise"):
        bound, _, value = left.converge(Phase(Clock(20.0), 1.0))
        assert np.isfinite(left.message).all() and bound == pytest.approx(value) == pytest.approx(0.0)
        small, proven = left.reduce(1.0)
    assert proven == pytest.approx(0.0) and small.lift(np.zeros(3, dtype=np.int64)).tolist() == [0, 0, 0]
