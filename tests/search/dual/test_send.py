"""The compiled message against its definition in numpy, and dominance's changes likewise: the same numbers to the bit."""
from __future__ import annotations

import numpy as np
import pytest

from autoshard.search.dual.messages import _send, _send_by_kind
from autoshard.search.reductions.dominance import _changes


def _case(k: int, width: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A table, the costs of its sender and the message that came back, with infinite ones among all."""
    rng = np.random.default_rng(seed)
    table, theta, back = rng.random((k, width)), rng.random(k), rng.random(k)
    table[rng.random((k, width)) < 0.2] = np.inf
    theta[1:][rng.random(k - 1) < 0.2] = np.inf
    back[np.isinf(theta) & (rng.random(k) < 0.5)] = np.inf  # a cost with an infinite message into it is infinite
    return table, theta, back


@pytest.mark.parametrize("width", [1, 3, 7, 33])
@pytest.mark.parametrize("k", range(1, 10))
def test_a_message_is_the_least_of_what_the_sender_costs(k: int, width: int) -> None:
    table, theta, back = _case(k, width, 10 * k + width)
    table[0] = np.arange(width)  # someone has a partner
    with np.errstate(invalid="ignore"):
        expected = np.fmin.reduce((0.5 * theta - back)[:, None] + table, axis=0)
    message, best, own = np.concatenate([back, np.full(width, 7.0)]), np.empty(64), np.empty(64)
    least = _send(table.ravel(), message, theta, best, 0, k, width, 0, 0, k, 0.5)
    assert least == expected.min()
    np.testing.assert_array_equal(message[k:], expected - least)
    np.testing.assert_array_equal(message[:k], back)
    message = np.concatenate([back, np.full(width, 7.0)])
    kinds = np.arange(max(k, width))
    assert _send_by_kind(kinds, 0, 0, k, width, table.ravel(), message, theta, own, best, 0, k, width, 0, 0, k, 0.5) == least
    np.testing.assert_array_equal(message[k:], expected - least)


@pytest.mark.parametrize(("k", "m"), [(1, 1), (2, 5), (9, 4), (70, 60)])
def test_changes_are_the_most_that_a_replacement_adds(k: int, m: int) -> None:
    table, _, _ = _case(k, m, k)
    with np.errstate(invalid="ignore"):
        expected = [[np.fmax.reduce(table[b] - table[a]) for b in range(k)] for a in range(k)]
        np.testing.assert_array_equal(_changes(table), np.array(expected))
