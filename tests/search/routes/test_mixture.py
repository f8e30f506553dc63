"""The best mixture of known choices: every node does what one of them does, or what is never dearer, and no such choice is cheaper."""
from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from autoshard.search import Clock, Problem, evaluate, mix
from tests.search.random_problems import random_problem


def some(problem: Problem, count: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [np.array([rng.integers(len(c)) for c in problem.node_costs]) for _ in range(count)]


def cheapest_mixture(problem: Problem, choices: list[np.ndarray]) -> float:
    """By trying all."""
    return min(evaluate(problem, np.array(each)) for each in itertools.product(*(sorted({int(c[v]) for c in choices}) for v in range(problem.n))))


def test_no_mixture_is_cheaper():
    better = 0
    for seed in range(60):
        problem = replace(random_problem(seed, nodes=7, most=3), intervals=None)
        choices = some(problem, 3, seed)
        least = min(evaluate(problem, choice) for choice in choices)
        found = mix(problem, choices, Clock(20.0))
        if found is None:
            assert not np.isfinite(least), seed
            continue
        choice, cost = found
        assert cost == evaluate(problem, choice), seed
        assert cost <= cheapest_mixture(problem, choices) * (1 + 1e-9) + 1e-12, seed
        better += cost < least
    assert better > 10, "one of the choices is seldom the best mixture"


def test_a_choice_alone_is_its_own_mixture():
    problem = next(p for p in (replace(random_problem(s), intervals=None) for s in range(50)) if np.isfinite(evaluate(p, some(p, 1, 0)[0])))
    choice, = some(problem, 1, 0)
    assert np.array_equal(mix(problem, [choice], Clock(20.0))[0], choice)
