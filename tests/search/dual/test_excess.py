"""Where a choice costs more than what is proven, and pairs that are made only there."""
from __future__ import annotations

import numpy as np
import pytest

from autoshard.search import Board, Clock, Edge, Problem, solve
from autoshard.search.clock import Phase
from autoshard.search.dual import excess
from autoshard.search.dual.dual import Dual
from autoshard.search.reductions.core import build
from autoshard.search.routes import priced

LAYOUTS, COPIES, CLUSTERS = 4, 9, 3


def clusters(seed: int, loose: tuple[int, ...] = tuple(range(CLUSTERS))) -> Problem:
    """Values in a chain, each with two readers and copies between the three: a message takes a copy from another strategy of the value for
    each reader. Clusters that are not `loose` have one reader's copies for nothing."""
    rng = np.random.default_rng(seed)
    costs, edges = [], []

    def link(u: int, v: int, table: np.ndarray) -> None:
        edges.append(Edge(u, v, table, np.arange(table.shape[0]), np.arange(table.shape[1])))

    for k in range(CLUSTERS):
        value, *readers = range(len(costs), len(costs) + 3)
        costs += [rng.random(LAYOUTS) for _ in range(3)]
        if k:
            link(value - 3 - COPIES, value, rng.random((LAYOUTS, LAYOUTS)))
        for _ in range(COPIES):
            copy = len(costs)
            costs.append(np.array([0.0, 0.1]))
            link(value, copy, np.stack([np.zeros(LAYOUTS), rng.random(LAYOUTS)], axis=1))
            for i, reader in enumerate(readers):
                scale = 1.0 if k in loose or i == 0 else 0.0
                link(copy, reader, scale * np.stack([rng.random(LAYOUTS) * (rng.random(LAYOUTS) < 0.5), np.zeros(LAYOUTS)]))
    return Problem(tuple(costs), tuple(edges))


@pytest.mark.parametrize("seed", range(6))
def test_the_excess_of_nodes_adds_up_to_what_the_bound_lacks(seed):
    dual = Dual(build(clusters(seed))[0], alike=True)
    bound, choice, value = dual.converge(Phase(Clock(20.0), 1.0))
    found = np.zeros(len(dual.nodes))
    excess._excess(dual.packed, dual.packed.cost, dual.proven, choice, found)
    assert found.min() > -1e-9 and found.sum() == pytest.approx(value - bound, abs=1e-6 * value)


@pytest.mark.parametrize("seed", range(6))
def test_pairs_around_the_excess_prove_the_optimum(seed, monkeypatch):
    """Tables count as large, so pairs are made nowhere else."""
    monkeypatch.setattr(priced, "STORED", 0)
    made, paired = [], priced._paired
    monkeypatch.setattr(priced, "_paired", lambda board, dual, largest, among=None: made.append(among) or paired(board, dual, largest, among))
    problem = clusters(seed)
    best = solve(problem, backend="milp").cost
    answer = priced.solve_priced(Board(problem, Clock(20.0)), build(problem)[0], np.zeros(0), 0)
    assert answer.bound <= best + 1e-9 and answer.bound == pytest.approx(best, rel=priced.LOOSE + 1e-9)
    assert made and answer.around == frozenset().union(*made)
    again = priced.solve_priced(Board(problem, Clock(20.0)), build(problem)[0], np.zeros(0), 0, around=answer.around)
    assert again.bound == pytest.approx(best, rel=priced.LOOSE + 1e-9)


def test_some_of_these_bounds_are_loose_before():
    loose = 0
    for seed in range(6):
        bound, _, _ = Dual(build(clusters(seed))[0], alike=True).converge(Phase(Clock(20.0), 1.0))
        loose += bound < solve(clusters(seed), backend="milp").cost * (1 - priced.LOOSE)
    assert loose, "the tests of pairs would pass without pairs"


def test_the_excess_lies_where_the_problem_is_loose():
    for seed in range(20):
        dual = Dual(build(clusters(seed, loose=(1,)))[0], alike=True)
        bound, choice, value = dual.converge(Phase(Clock(20.0), 1.0))
        if value - bound > 1e-3 * bound:
            size = 3 + COPIES
            near = excess.loose_nodes(dual, choice)
            assert near and any(v // size == 1 for v in near)
            return
    pytest.fail("no problem of these is loose")
