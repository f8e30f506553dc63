"""The mixed-integer program of a core."""
from __future__ import annotations

import numpy as np
import pytest

from autoshard.search import Edge, Items, Problem, evaluate, solve
from autoshard.search.reductions.core import build
from autoshard.search.reductions.gather import gather
from autoshard.search.routes import milp


@pytest.mark.parametrize("unit", [1e9, 1.0, 1e-7])
def test_a_row_is_as_exact_in_seconds_as_in_bytes(unit: float):
    """Loads of a tenth of a microsecond are far below what solvers tolerate on a row."""
    rng, n, every = np.random.default_rng(3), 7, np.arange(3)
    edges = tuple(Edge(v, v + 1, unit * rng.random((3, 3)), every, every) for v in range(n - 1))
    items = Items(np.repeat(np.arange(n), 3), np.tile(every, n), np.zeros(3 * n, dtype=np.int64), unit * rng.random(3 * n))
    problem = Problem(tuple(unit * rng.random(3) for _ in range(n)), edges, np.array([0.3 * n * unit]), np.array([2.0]), items)
    least = solve(problem, backend="brute").cost
    found = milp.solve_mip(build(problem)[0], 60.0)
    assert found.proven and not found.timed
    assert found.bound == pytest.approx(least, rel=1e-9)
    assert solve(problem, backend="milp").cost == pytest.approx(least, rel=1e-12)


def equal_layers(layers: int) -> Problem:
    """Layers of two nodes and an edge, all alike, that share a hard and a priced row; and a node that has no copy."""
    rng, every = np.random.default_rng(8), np.arange(3)
    costs, table = (rng.random(3), rng.random(3)), rng.random((3, 3))
    edges = tuple(Edge(2 * i, 2 * i + 1, table, every, every) for i in range(layers))
    node, strategy, row = (x.ravel() for x in np.meshgrid(np.arange(2 * layers), every, np.arange(2), indexing="ij"))
    amount = rng.random((2, 3, 2))[node % 2, strategy, row]
    return Problem((*costs * layers, rng.random(2)), edges, np.array([0.6, 0.4]) * layers, np.array([np.inf, 0.7]), Items(node, strategy, row, amount))


def test_layers_that_look_the_same_are_counted():
    problem = equal_layers(3)
    core = build(problem)[0]
    gather(core)
    model = milp.MipModel(core)
    assert sorted(map(len, model.copies)) == [1, 3]
    found = milp.solve_mip(core, 60.0)
    choice = core.lift(found.choice)
    least = solve(problem, backend="brute").cost
    assert evaluate(problem, choice) == pytest.approx(least, rel=1e-12)
    assert found.proven and found.bound == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize(("count", "at_once"), [(2, True), (milp.FEW_ROWS + 1, False)])
def test_few_hard_rows_are_in_the_program_at_once(count: int, at_once: bool):
    every, rows = np.arange(3), np.arange(count)
    node, strategy, row = (x.ravel() for x in np.meshgrid(np.arange(2), every, rows, indexing="ij"))
    problem = Problem((np.arange(3.0), np.arange(3.0)), (), np.full(count, 3.0), np.full(count, np.inf), Items(node, strategy, row, 2.0 - strategy))
    core = build(problem)[0]
    assert milp.MipModel(core).rows == (set(rows.tolist()) if at_once else set())
    found = milp.solve_mip(core, 20.0)
    assert found.proven and found.bound == pytest.approx(solve(problem, backend="brute").cost) == pytest.approx(1.0)


def test_counts_that_a_solver_leaves_a_little_off_are_whole():
    items = Items(np.repeat(np.arange(5), 3), np.tile(np.arange(3), 5), np.zeros(15, dtype=np.int64), np.tile([3.0, 2.0, 1.0], 5))
    model = milp.MipModel(build(Problem((np.array([1.0, 2.0, 3.0]),) * 5, (), np.array([9.0]), np.array([np.inf]), items))[0])
    assert model.copies == [[0, 1, 2, 3, 4]]
    taken = model._whole(np.array([2.0 - 1e-8, 1e-9, 3.0 + 1e-8]))
    assert taken.tolist() == [2, 0, 3] and model.choice(taken).tolist() == [0, 0, 2, 2, 2]
    assert model._whole(np.array([1.6, 0.3, 3.1])).tolist() == [2, 0, 3]


def test_many_equal_layers_balance_on_a_row_within_few_nodes_of_a_tree():
    """One by one, sixty layers that swap places are too much for any tree."""
    core = build(equal_layers(60))[0]
    gather(core)
    found = milp.solve_mip(core, 60.0, nodes=2000)
    assert found.proven and not found.timed
