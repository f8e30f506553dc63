"""Every backend against brute force: feasible, cost as evaluated, bound <= optimum <= cost, and "optimal" means it.

Ten thousand of these are run by `python benchmarks/random_search.py`."""
from __future__ import annotations

import pytest
from random_problems import EXACT, answer, disagreement, random_problem

from autoshard.search import BACKENDS, solve


@pytest.mark.parametrize("route", EXACT)
@pytest.mark.parametrize("block", range(3))
def test_backends_that_decide_agree(route: str, block: int):
    check(route, range(100 * block, 100 * block + 100), exact=True)


@pytest.mark.parametrize("route", ["local", "few rows", "by prices"])
def test_routes_of_large_problems_claim_nothing_wrong(route: str):
    check(route, range(40), exact=False)


def test_no_backend_is_left_out():
    assert set(BACKENDS) == {*EXACT, "local", "brute"}


def check(route: str, seeds: range, *, exact: bool) -> None:
    for seed in seeds:
        problem = random_problem(seed)
        wrong = disagreement(problem, solve(problem, backend="brute"), answer(problem, route), exact=exact)
        assert wrong is None, f"seed {seed}: {wrong}"
