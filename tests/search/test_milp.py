"""The mixed-integer program of a core."""
from __future__ import annotations

import numpy as np
import pytest

from autoshard.search import Edge, Items, Problem, milp, solve
from autoshard.search.core import build


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
