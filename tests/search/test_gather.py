"""Groups that only rows link, under an assumed cost: what a choice of that cost may take stays, whatever the prices."""
from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from autoshard.search import Board, Clock, Edge, Items, Problem, evaluate, solve
from autoshard.search.reductions import Infeasible
from autoshard.search.reductions import gather as gathering
from autoshard.search.reductions.core import build
from autoshard.search.reductions.gather import Assumed, components, gather
from autoshard.search.routes.milp import solve_mip
from autoshard.search.routes.priced import _bounded


def layers(seed: int) -> Problem:
    """Rings of four nodes on a priced and a hard row: three layers that look the same, one that does not, and a node alone."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 5, size=4)
    costs, loads = [rng.random(k) for k in sizes], [rng.random((k, 2)) for k in sizes]
    tables = [rng.random((sizes[i], sizes[(i + 1) % 4])) for i in range(4)]
    tables[0][rng.random(tables[0].shape) < 0.2] = np.inf
    tables[0][0], tables[0][:, 0] = 0.5, 0.5
    every = [np.arange(k) for k in sizes]
    nodes, edges, items = [], [], []
    for layer in range(4):
        for i in range(4):
            nodes.append(costs[i] * (1.0 if layer < 3 else 1.3))
            items += [(4 * layer + i, s, row, loads[i][s, row]) for s in range(sizes[i]) for row in (0, 1)]
            j = (i + 1) % 4
            edges.append(Edge(4 * layer + i, 4 * layer + j, tables[i], every[i], every[j]))
    nodes.append(np.array([0.3, 0.0]))
    items.append((16, 1, 0, 0.7))
    return Problem(tuple(nodes), tuple(edges), np.array([5.0, 6.5]), np.array([0.8, np.inf]), Items(*(np.array(x) for x in zip(*items, strict=True))))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("above", (0.0, 0.02, 1.0))
def test_the_best_choice_stays_where_its_cost_is_assumed(seed, above, monkeypatch):
    monkeypatch.setattr(gathering, "FEW", 6)  # so that dear joint strategies are looked for in small groups too
    problem, rng = layers(seed), np.random.default_rng(seed)
    best = solve(problem, backend="milp").cost
    core, bounded = build(problem)[0], partial(_bounded, Board(problem, Clock(60.0)))
    for prices in (np.zeros(2), np.array([0.8, 0.0]), rng.random(2) * 0.8):
        left = core.copy()
        gather(left, Assumed(prices, best + above, bounded))
        assert all(len(group) == 1 for group in components(left)), "every group is one node"
        answer = solve_mip(left, 20.0)
        assert answer.bound == pytest.approx(best) and evaluate(problem, left.lift(answer.choice)) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(20))
def test_a_cost_below_all_choices_is_refuted_or_not_found(seed, monkeypatch):
    monkeypatch.setattr(gathering, "FEW", 6)
    problem = layers(seed)
    best = solve(problem, backend="milp").cost
    for below in (0.01, 0.5, 3.0):
        left = build(problem)[0]
        try:
            gather(left, Assumed(np.array([0.8, 0.1]), best - below, partial(_bounded, Board(problem, Clock(60.0)))))
        except Infeasible:
            continue
        assert solve_mip(left, 20.0).bound >= best - 1e-6


def test_near_the_bound_fewer_strategies_are_left_than_dominance_leaves(monkeypatch):
    monkeypatch.setattr(gathering, "FEW", 6)
    left = [0, 0]
    for seed in range(20):
        problem = layers(seed)
        best = solve(problem, backend="milp").cost
        for n, above in enumerate((0.0, 100.0)):
            core = build(problem)[0]
            gather(core, Assumed(np.array([0.4, 0.0]), best + above, partial(_bounded, Board(problem, Clock(60.0)))))
            left[n] += sum(len(core.cost[v]) for v in core.alive)
    assert left[0] < 0.95 * left[1]
