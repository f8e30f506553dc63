"""Sweeps with momentum: the bound they prove holds, and it is reached in a fraction of the sweeps."""
from __future__ import annotations

import numpy as np
import pytest

from autoshard.search import Edge, Problem, solve
from autoshard.search.clock import Clock, Phase
from autoshard.search.dual import messages
from autoshard.search.dual.dual import Dual
from autoshard.search.reductions.core import build

VALUES, LAYOUTS, COPIES = 4, 5, 16


def copied(seed: int, copies: int = COPIES) -> Problem:
    """A chain of values; between two of them a copy node for each of many targets, absent or made."""
    rng = np.random.default_rng(seed)
    costs, edges = [rng.random(LAYOUTS) for _ in range(VALUES)], []
    for v in range(VALUES - 1):
        for c in range(copies):
            costs.append(np.zeros(2))
            made, reads = rng.random(LAYOUTS), rng.random(LAYOUTS)
            edges += [Edge(v, len(costs) - 1, np.stack([np.zeros(LAYOUTS), made], axis=1), np.arange(LAYOUTS), np.arange(2)),
                      Edge(len(costs) - 1, v + 1, np.stack([reads, np.zeros(LAYOUTS)]), np.arange(2), np.arange(LAYOUTS))]
    return Problem(tuple(costs), tuple(edges))


def proven(dual: Dual) -> float:
    """The bound that the messages prove, whatever made them."""
    p = dual.packed
    messages.sweep(p, p.cost, dual.message, np.empty_like(p.cost), False)
    message = dual.message.copy()
    return float(messages.decouple(p, p.cost, message, 2.0**-40)) + dual.core.constant


def after(problem: Problem, sweeps: int, momentum: bool) -> float:
    dual = Dual(build(problem)[0])
    theta = np.empty_like(dual.packed.cost)
    if momentum:
        messages.sweep_ahead(dual.packed, dual.message, dual.before, dual.pace, theta, sweeps)
        return proven(dual)
    for _ in range(sweeps):
        messages.sweep(dual.packed, dual.packed.cost, dual.message, theta, False)
        messages.sweep(dual.packed, dual.packed.cost, dual.message, theta, True)
    return proven(dual)


def optimum(problem: Problem) -> float:
    return solve(problem, backend="milp").cost


@pytest.mark.parametrize("seed", range(4))
def test_a_third_of_the_sweeps_goes_further(seed):
    problem = copied(seed)
    best = optimum(problem)
    gaps = [best - after(problem, 60, True), best - after(problem, 180, False)]
    assert -1e-9 < gaps[0] < gaps[1], f"what the bound lacks with momentum, and without in three times as many sweeps: {gaps}"


@pytest.mark.parametrize("seed", range(12))
def test_no_number_of_sweeps_proves_more_than_the_optimum(seed):
    problem = copied(seed, copies=1 + seed % 4)
    best = optimum(problem)
    assert all(after(problem, sweeps, True) <= best + 1e-9 for sweeps in (1, 2, 5, 20, 100))


def test_it_goes_on_where_it_stopped():
    problem = copied(1)
    parts, whole = Dual(build(problem)[0]), Dual(build(problem)[0])
    for dual, turns in ((parts, (10, 20, 30)), (whole, (60,))):
        for sweeps in turns:
            messages.sweep_ahead(dual.packed, dual.message, dual.before, dual.pace, np.empty_like(dual.packed.cost), sweeps)
    assert np.array_equal(parts.message, whole.message) and parts.pace[0] > 0
    assert proven(parts) - 1e-9 <= whole.converge(Phase(Clock(20.0), 1.0))[0] <= optimum(problem) + 1e-9
