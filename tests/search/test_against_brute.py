"""Every backend against brute force: feasible, cost as evaluated, bound <= optimum <= cost."""
from __future__ import annotations

import pytest
from random_problems import random_problem

from autoshard.search import BACKENDS, Status, evaluate, solve


@pytest.mark.parametrize("backend", sorted(set(BACKENDS) - {"brute", "local"}))
@pytest.mark.parametrize("block", range(3))
def test_random_problems_agree(backend: str, block: int):
    for seed in range(100 * block, 100 * block + 100):
        problem = random_problem(seed)
        reference = solve(problem, backend="brute")
        found = solve(problem, backend=backend, time_limit=20.0)
        if reference.choice is None:
            assert found.status is Status.INFEASIBLE, f"seed {seed}: brute force finds nothing, {backend} {found}"
            continue
        slack = 1e-8 * max(1e-9, abs(reference.cost))
        assert found.choice is not None, f"seed {seed}: {backend} finds nothing, the optimum is {reference.cost}"
        assert evaluate(problem, found.choice) == found.cost, f"seed {seed}: cost is not the choice's cost"
        assert found.bound <= reference.cost + slack, f"seed {seed}: {found.bound} is no lower bound of {reference.cost}"
        assert abs(found.cost - reference.cost) <= slack, f"seed {seed}: {found.cost} against {reference.cost}"
        assert found.status is Status.OPTIMAL, f"seed {seed}: {found.status}"


@pytest.mark.parametrize("seed", range(0, 12))
def test_local_search_is_feasible_and_its_bound_valid(seed: int):
    problem = random_problem(seed)
    reference = solve(problem, backend="brute")
    found = solve(problem, backend="local", time_limit=0.5, threads=1)
    if reference.choice is None:
        assert found.choice is None, f"seed {seed}: a choice where none is feasible"
        return
    slack = 1e-8 * max(1e-9, abs(reference.cost))
    assert found.bound <= reference.cost + slack, f"seed {seed}: {found.bound} is no lower bound of {reference.cost}"
    assert found.cost >= reference.cost - slack, f"seed {seed}: cheaper than the optimum"
    assert found.choice is None or evaluate(problem, found.choice) == found.cost, f"seed {seed}: cost is not the choice's"
