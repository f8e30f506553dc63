"""Prices of tied layers where tables are large: strategies that no cheaper choice takes go between prices, and nothing wrong is claimed."""
from __future__ import annotations

import numpy as np
import pytest
from random_problems import answer, disagreement

from autoshard.search import Board, Clock, Edge, Items, Problem, solve
from autoshard.search.reductions.core import build
from autoshard.search.routes import plans, priced


def layered(seed: int) -> Problem:
    """Two to four layers in a chain, each of four to six nodes, on two rows; every second problem has a hard one."""
    rng = np.random.default_rng(seed)
    per, layers = int(rng.integers(4, 7)), int(rng.integers(2, 5))
    sizes = rng.integers(3, 6, size=per)
    every, costs = [np.arange(k) for k in sizes], [rng.random(k) for k in sizes]
    loads = [rng.random((k, 2)) * (rng.random((k, 2)) < 0.7) for k in sizes]
    tables = {}
    pairs = [(u, v) for u in range(per) for v in range(u + 1, per) if v == u + 1 or rng.random() < 0.4]
    for i, j in pairs:
        tables[i, j] = rng.random((sizes[i], sizes[j]))
        tables[i, j][rng.random(tables[i, j].shape) < 0.15] = np.inf
        tables[i, j][0] = tables[i, j][:, 0] = 0.6  # every strategy has a partner
    joint = rng.random((sizes[-1], sizes[0]))
    items, edges = [], []
    for first in range(0, layers * per, per):
        items += [(first + i, s, row, loads[i][s, row]) for i in range(per) for s in range(sizes[i]) for row in (0, 1)]
        edges += [Edge(first + i, first + j, table, every[i], every[j]) for (i, j), table in tables.items()]
        edges += [Edge(first - 1, first, joint, every[-1], every[0])] if first else []
    least, most = (layers * sum(of(load, axis=0) for load in loads) for of in (np.min, np.max))
    price = np.array([2.0 * rng.random(), 2.0 * rng.random() if seed % 2 else np.inf])
    return Problem(tuple(costs) * layers, tuple(edges), least + (most - least) * rng.uniform(0.2, 0.5, 2), price,
                   Items(*(np.array(x) for x in zip(*items, strict=True))), groups=np.tile(np.arange(per), layers))


@pytest.fixture
def narrowed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Every table is large, and every cost known is close; whether strategies went, whenever that was asked."""
    seen: list[bool] = []

    def cheaper(board: Board, at: priced.Priced):
        less = found(board, at)
        seen.append(less is not None)
        return less

    found = plans._cheaper
    for module, name, value in ((plans, "STORED", 0), (priced, "STORED", 0), (plans, "CLOSE", 1e9), (plans, "_cheaper", cheaper)):
        monkeypatch.setattr(module, name, value)
    return seen


def test_what_no_cheaper_choice_takes_may_go(narrowed: list[bool]):
    for seed in range(8):
        problem = layered(seed)
        assert disagreement(problem, solve(problem, backend="milp"), answer(problem, "few rows"), exact=False) is None, seed
    assert any(narrowed)


def test_where_the_bound_must_hold_for_all_choices_none_goes(narrowed: list[bool]):
    """As a bound that adds up over parts of a problem must: at its prices no choice of this part is cheaper, be it ever so dear as a whole."""
    for seed in range(4):
        problem = layered(seed)
        board, core = Board(problem, Clock(20.0)), build(problem)[0]
        board.offer(solve(problem, backend="milp").choice)
        plans.search_prices(board, core, [], 0)
    assert narrowed == []
