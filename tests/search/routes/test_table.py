"""Tables of pairs of strategies: dense once they are read, and refused where they would not fit into memory."""
from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest

from autoshard.base.memory import free_memory, give_back_memory
from autoshard.errors import SearchSizeError
from autoshard.search import Edge, Problem, Status, solve
from autoshard.search.reductions import core as cores
from autoshard.search.reductions.core import build, stored_entries
from autoshard.search.reductions.table import Kinds, Table
from autoshard.search.routes import plans, priced, prices
from tests.search.random_problems import layered_problem

SMALL = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
ROWS, COLS = np.array([1, 0, 1, 1]), np.array([2, 2, 0])


def test_a_table_of_kinds_is_the_dense_one():
    dense = SMALL[np.ix_(ROWS, COLS)]
    kept = np.array([0, 2])
    for read in (lambda t: t, lambda t: t.T.T, lambda t: t.take(kept).T.T):
        table = read(Table(None, kinds=Kinds(SMALL, ROWS, COLS)))
        expected = dense if len(table.a) == 4 else dense[kept]
        np.testing.assert_array_equal(table.a, expected)
        np.testing.assert_array_equal(table.T.a, expected.T)
        assert table.T.a.flags.c_contiguous and table.shape == expected.shape and table.T.shape == expected.T.shape


@pytest.mark.parametrize("transposed_first", [False, True])
def test_a_table_and_its_transpose_stay_each_others(transposed_first: bool):
    table = Table(None, kinds=Kinds(SMALL, ROWS, COLS))
    if not transposed_first:
        assert table.a is table.a
    assert table.T is table.T and table.T.T is table
    other = table.T
    del table
    np.testing.assert_array_equal(other.T.a, SMALL[np.ix_(ROWS, COLS)])
    assert other.T is other.T and other.T.T is other


def test_a_problem_takes_the_memory_of_its_kinds_until_it_is_reduced():
    many = 3000
    index = np.arange(many) % 3
    problem = Problem((np.arange(many, dtype=float), np.arange(many, dtype=float)), (Edge(0, 1, np.eye(3), index, index),))
    with patch.object(cores, "_distinct", lambda *_: None):  # it would keep three strategies of each
        core = build(problem)[0]
    assert stored_entries(core) == many ** 2 and core.adj[0][1]._dense is None and core.adj[1][0]._dense is None


def test_a_search_that_does_not_fit_into_memory_says_so_before_it_begins():
    rng = np.random.default_rng(0)
    problem = Problem((rng.random(40), rng.random(30)), (Edge(0, 1, rng.random((40, 30)), np.arange(40), np.arange(30)),))
    with (patch.object(cores, "LITTLE", 0.0), patch.object(cores, "free_memory", lambda: 40e3),
          pytest.raises(SearchSizeError, match=r"2 nodes of up to 40 strategies.* fewer axes")):
        solve(problem)
    assert solve(problem).status is Status.OPTIMAL


def test_a_search_on_large_tables_ends_near_the_optimum():
    """With the gap as users have it; random_problems closes it."""
    ended = set()
    for seed in range(6):
        problem = layered_problem(seed)
        best = solve(problem, backend="milp")
        with (patch.object(plans, "STORED", -1), patch.object(priced, "STORED", -1), patch.object(prices, "STORED", -1), patch.object(plans, "CLOSE", 0.05),
              patch("autoshard.search.routes.auto.SMALL_MIP", 0)):
            found = solve(problem, time_limit=20.0)
        assert found.bound <= best.cost * (1 + 1e-9) and best.cost <= found.cost * (1 + 1e-9) and found.gap <= 0.05
        ended.add(found.status)
    assert Status.GAP in ended, "none of them was left before it was proven"


def test_memory_is_given_back():
    before = free_memory()
    give_back_memory()
    assert before > 0 and free_memory() > 0
