"""Bounds of problems that are never made dense."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autoshard.search import Edge, Items, Problem, evaluate, solve
from autoshard.search.dual.factored import Sweeps, with_partners
from autoshard.search.problem import Status
from autoshard.search.reductions import Infeasible
from tests.search.random_problems import layered_problem, random_problem


def without_rows(problem: Problem) -> Problem:
    return Problem(problem.node_costs, problem.edges)


def kept(problem: Problem, left: list[np.ndarray]) -> Problem:
    return Problem(tuple(c[k] for c, k in zip(problem.node_costs, left, strict=True)),
                   tuple(Edge(e.u, e.v, e.table, e.rows[left[e.u]], e.cols[left[e.v]]) for e in problem.edges))


@pytest.mark.parametrize("seeds", [range(start, start + 150) for start in (0, 150)], ids=str)
def test_bounds_are_valid_and_strategies_of_the_optimum_have_partners(seeds: range) -> None:
    close = []
    for seed in seeds:
        problem = without_rows(random_problem(seed))
        best = solve(problem, backend="brute")
        try:
            left = with_partners(problem.node_costs, problem.edges)
        except Infeasible:
            assert best.status is Status.INFEASIBLE, f"seed {seed}"
            continue
        if best.choice is None:
            continue
        assert all(s in k for s, k in zip(best.choice, left, strict=True)), f"seed {seed}"
        fewer = kept(problem, left)
        sweeps = Sweeps(fewer)
        sweeps.run(20)
        assert sweeps.bound <= best.cost + 1e-9 * max(1e-12, abs(best.cost)), f"seed {seed}"
        choice = sweeps.choice()
        assert sweeps.cost(choice) == pytest.approx(evaluate(fewer, choice)) or evaluate(fewer, choice) == np.inf
        close.append(best.cost - sweeps.bound <= 1e-6 * max(1e-12, abs(best.cost)))
    assert np.mean(close) > 0.8


def test_of_a_tree_the_bound_is_the_optimum() -> None:
    rng = np.random.default_rng(0)
    tables = [rng.random((3, 4)) for _ in range(6)]
    rows, cols = rng.permutation(3), np.array([2, 0, 1, 3, 3])
    costs = tuple(rng.random(3 if n == 0 else 5) for n in range(7))
    edges = tuple(Edge(0, n + 1, t, rows, cols) for n, t in enumerate(tables))
    problem = Problem(costs, edges, items=Items.empty())
    sweeps = Sweeps(problem)
    sweeps.run(5)
    best = solve(problem, backend="brute").cost
    assert sweeps.bound == pytest.approx(best, rel=1e-9) and sweeps.cost(sweeps.choice()) == pytest.approx(best, rel=1e-9)


def test_messages_of_like_problems_are_a_start() -> None:
    problem = without_rows(replace(layered_problem(3), groups=None))
    problem = kept(problem, with_partners(problem.node_costs, problem.edges))
    first = Sweeps(problem)
    first.run(30)
    dearer = Problem(tuple(c * 1.01 for c in problem.node_costs), problem.edges)
    anew, on = Sweeps(dearer), Sweeps(dearer, first)
    for sweeps in (anew, on):
        sweeps.run(1)
    assert on.bound >= anew.bound - 1e-9
