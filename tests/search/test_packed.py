"""The order of sweeps, and tables whose equal rows are stored once."""
from __future__ import annotations

import numpy as np
import pytest

from autoshard.search import Clock, Edge, Problem, evaluate
from autoshard.search.clock import Phase
from autoshard.search.dual import messages
from autoshard.search.dual.dual import Dual
from autoshard.search.dual.packed import along, pack
from autoshard.search.reductions.core import build


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
