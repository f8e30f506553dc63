"""Measured curves: what they say between, below and above their points, and which are refused."""
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost.curve import Curve, problem


def test_worked_numbers():
    assert Curve((0.0, 1e6), (1e-4, 1.1e-3))(np.array([5e5, 2e6])).tolist() == pytest.approx([6e-4, 2.1e-3])
    assert Curve((1e3, 1e6), (1e-4, 1e-3))(10.0) == 1e-4


@given(st.lists(st.tuples(st.floats(1e-3, 1e6), st.floats(0, 1)), min_size=2, max_size=8), st.floats(0, 1e9), st.floats(0, 1e9))
def test_monotone_and_through_its_points(steps, a, b):
    amounts, seconds = np.cumsum([s[0] for s in steps]), np.cumsum([s[1] for s in steps]) + 1e-9
    curve = Curve(tuple(amounts.tolist()), tuple(seconds.tolist()))
    assert curve(amounts) == pytest.approx(seconds)
    assert curve(min(a, b)) <= curve(max(a, b)) * (1 + 1e-12)
    assert problem(curve.points) == ""


@pytest.mark.parametrize("points, message", [
    ([], "at least two"), ([[1, 2]], "at least two"), ([[2, 1], [1, 2]], "must increase"), ([[-1, 1], [1, 2]], "not be negative"),
    ([[1, 2], [3, 1]], "must not fall"), ([[1, 0], [3, 1]], "must be positive")])
def test_problems(points, message):
    assert message in problem(points)
