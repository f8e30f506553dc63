"""What it costs a producer to serve a copy in each of its states."""
import numpy as np

from autoshard.formulate.copies import copy_states, producer_table
from autoshard.space.strategies import SpecIndex

INF = np.inf
SPECS = SpecIndex(((-1,), (0,), (1,)), np.arange(3))
PRICES = np.array([2.0, 0.0, INF])  # of reaching (0,)


def table(readers, windows, runs, *, priced):
    states = copy_states(SPECS, (0,), PRICES, readers, windows, priced, None)
    return [s.name for s in states], producer_table(SPECS, (0,), PRICES, states, runs)


def test_a_copy_costs_its_seconds_in_every_window_that_makes_it():
    names, found = table({0, 1}, 2, (4, 1), priced=False)
    assert names == ["absent", "own", "made", "made", "made", "kept"]  # in one window, in the other, in both; kept
    np.testing.assert_array_equal(found, [[0, INF, 8, 2, 10, 8], [0, 0, INF, INF, INF, INF], [0, INF, INF, INF, INF, INF]])


def test_where_states_have_the_price_only_the_producer_of_that_price_serves_them():
    names, found = table({0}, 1, (3,), priced=True)
    assert names == ["absent", "own", "made"]
    np.testing.assert_array_equal(found, [[0, INF, 0], [0, 0, INF], [0, INF, INF]])
