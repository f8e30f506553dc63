"""Every backend against brute force: feasible, cost as evaluated, bound <= optimum <= cost, and "optimal" means it.

Ten thousand of these are run by `python -m benchmarks.search.random_search`."""
from __future__ import annotations

from unittest.mock import patch

import pytest
from random_problems import EXACT, answer, disagreement, layered_problem, random_problem

from autoshard.search import BACKENDS, solve
from autoshard.search.dual.copies import Alike
from autoshard.search.dual.dual import Dual

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


def check(route: str, seeds: range, *, exact: bool) -> None:
    for seed in seeds:
        problem = random_problem(seed)
        wrong = disagreement(problem, solve(problem, backend="brute"), answer(problem, route), exact=exact)
        assert wrong is None, f"seed {seed}: {wrong}"
