"""Matrix products cut into tiles: worked by hand, and never cheaper for more work."""
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost.tiles import filled

sizes = st.integers(1, 20_000)


@pytest.mark.parametrize(("shape", "share"), [
    ((4096, 4096, 4096, 1, 132), 512 / (4 * 132)),                 # 16 x 32 tiles of 256 x 128 in 4 rounds
    ((256, 128, 64, 132, 132), 1.0),                               # a batch per multiprocessor
    ((256, 128, 64, 133, 132), 133 / 264),                         # one more: a second round for one tile; K is too short for pieces
    ((1, 4096, 1024, 1, 108), None),
])
def test_worked(shape, share):
    if share is None:
        assert filled(*shape) < 1 / 60, "of 64 rows of a tile one is used"
    elif share == 133 / 264:
        assert share <= filled(*shape) < 0.8, "smaller tiles leave less over"
    else:
        assert filled(*shape) == pytest.approx(share)


def test_pieces_of_a_deep_product_fill_the_device():
    """The gradient of a weight of 1024 x 1024 from 8,192 tokens: 64 tiles of 128 x 128 for 108 multiprocessors, cut along K."""
    assert filled(1024, 1024, 8192, 1, 108) > 0.9 > filled(1024, 1024, 64, 1, 108)


@given(sizes, sizes, sizes, st.integers(1, 64), st.sampled_from((1, 80, 108, 132)), st.integers(0, 3), st.integers(1, 500))
def test_time_never_falls_as_a_product_grows(rows, columns, depth, batches, multiprocessors, which, more):
    small = [rows, columns, depth, batches]
    large = [n + more * (i == which) for i, n in enumerate(small)]
    a, b = (np.prod(np.array(s, float)) / filled(*s, multiprocessors) for s in (small, large))
    assert a <= b * (1 + 1e-12) and 0 < filled(*small, multiprocessors) <= 1
