"""Every backend against brute force: feasible, cost as evaluated, bound <= optimum <= cost, and "optimal" means it.

Ten thousand of these are run by `python -m benchmarks.search.random_search`."""
from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest

from autoshard.search import BACKENDS, solve
from autoshard.search.dual.copies import Alike
from autoshard.search.dual.dual import Dual
from autoshard.search.problem import Edge, Problem
from tests.search.random_problems import EXACT, answer, disagreement, layered_problem, random_problem

BEGIN = Alike.begin


@pytest.mark.parametrize("route", EXACT)
@pytest.mark.parametrize("block", range(3))
def test_backends_that_decide_agree(route: str, block: int):
    check(route, range(100 * block, 100 * block + 100), exact=True)


@pytest.mark.parametrize("route", ["local", "few rows", "by sweeps", "large tables", "by prices"])
def test_routes_of_large_problems_claim_nothing_wrong(route: str):
    check(route, range(40), exact=False)


def test_layers_that_share_rows():
    """Where tables are large, sweeps of the whole problem begin with the messages of the tied one."""
    begun = []

    def begin(alike: Alike, whole: Dual) -> None:
        BEGIN(alike, whole)
        begun.append(alike.tied is not None and whole.message.any())

    with patch.object(Alike, "begin", begin):
        found = [(layered_problem(seed), answer(layered_problem(seed), "large tables")) for seed in range(4)]
    assert sum(begun) >= 3
    for seed, (problem, solution) in enumerate(found):
        wrong = disagreement(problem, solve(problem, backend="milp"), solution, exact=True)
        assert wrong is None, f"seed {seed}: {wrong}"


def test_no_backend_is_left_out():
    assert set(BACKENDS) == {*EXACT, "local", "brute"}


def test_brute_force_takes_many_nodes_of_which_few_have_a_choice():
    """Inference on one device: numpy counts at most 64 dims."""
    costs = [np.array([1.0])] * 80 + [np.array([2.0, 1.0, 3.0]), np.array([1.0, 0.5])]
    found = solve(Problem(tuple(costs), (Edge(80, 81, np.array([[0.0, 0.0], [0.0, 9.0], [0.0, 0.0]]), np.arange(3), np.arange(2)),)), backend="brute")
    assert found.cost == found.bound == 82.0 and found.choice[-2:].tolist() == [1, 0]


def check(route: str, seeds: range, *, exact: bool) -> None:
    for seed in seeds:
        problem = random_problem(seed)
        wrong = disagreement(problem, solve(problem, backend="brute"), answer(problem, route), exact=exact)
        assert wrong is None, f"seed {seed}: {wrong}"
