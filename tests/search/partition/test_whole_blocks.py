"""The bound of the fullest rank against all ways to give blocks to ranks."""
from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from autoshard.pipeline.schedules import make_schedule
from autoshard.pipeline.shapes.partitions import course_of, price_by_play
from autoshard.search.partition import chain_of_blocks, partition
from autoshard.search.partition.whole_blocks import fullest_rank, fullest_unlike


def tried(seconds: np.ndarray, ranks: int) -> float:
    """The least of the fullest rank, by trying all."""
    ways = np.array(list(product(range(ranks), repeat=len(seconds))))
    return float(min(max(seconds[way == r].sum() for r in range(ranks)) for way in ways))


def test_it_is_the_best_of_all_ways():
    rng = np.random.default_rng(0)
    for _ in range(60):
        equal, unlike, ranks = int(rng.integers(1, 6)), int(rng.integers(0, 3)), int(rng.integers(1, 4))
        seconds = rng.permutation(np.concatenate([np.full(equal, rng.uniform(0.5, 2.0)), rng.uniform(0.0, 3.0, unlike)]))
        assert fullest_rank(seconds, ranks) == pytest.approx(tried(seconds, ranks))


def test_eighty_layers_and_a_head():
    """On 16 ranks one has five layers and the head, or one has six."""
    def model(head: float) -> np.ndarray:
        return np.array([0.0, *[1.0] * 80, 0.0, head])

    assert fullest_rank(model(0.8), 16) == pytest.approx(5.8)
    assert fullest_rank(model(1.4), 16) == pytest.approx(6.0)
    assert fullest_rank(model(0.8), 1) == pytest.approx(80.8)
    assert fullest_rank(np.arange(1.0, 12.0), 3) <= 22.0, "many blocks that are unlike each other: what is left out makes it lower, never higher"


def test_ranks_on_which_blocks_take_other_seconds():
    """Never above the best of all ways, and equal where one block at most is unlike the others."""
    rng = np.random.default_rng(1)
    for _ in range(60):
        equal, unlike, ranks = int(rng.integers(2, 6)), int(rng.integers(0, 3)), int(rng.integers(1, 4))
        kind = np.concatenate([np.zeros(equal, int), np.arange(1, unlike + 1)])
        seconds = rng.uniform(0.5, 2.0, unlike + 1)
        rows = [np.tile(seconds[kind], (ranks, 1)), (rng.uniform(0.5, 2.0, (ranks, 1)) * rng.uniform(0.5, 2.0, unlike + 1))[:, kind]]
        paid = [0.0, float(rng.uniform(0.0, 2.0))]
        ways = product(range(ranks), repeat=len(kind))
        best = min(max(row[r, np.array(way) == r].sum() - back for row, back in zip(rows, paid) for r in range(ranks)) for way in ways)
        found = fullest_unlike(rows, paid)
        assert found <= best * (1 + 1e-8)
        assert unlike > 1 or found == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize(("schedule", "chunks", "within"), [("zb1p", 4, 1.3), ("zbv", 2, 1.4)])
def test_ranks_with_several_stages_get_as_many_blocks(schedule, chunks, within):
    """80 layers and a head on 16 ranks, where a rank has room for a little more than its part: even stages leave eight layers to some ranks."""
    table = make_schedule(schedule, 16, 16, chunks)
    course, layers = course_of(table), np.array([0.05, *[1.0] * 80, 0.02, 0.8])
    chain = chain_of_blocks(layers, layers, weight=layers, saved=layers, between=layers)
    found = partition(chain, course, price_by_play(chain, table), 1.2 * 5 * 16, 200)
    assert found.cuts, "no partition was found to fit"
    assert found.seconds < within * 3 * 16 * layers.sum() / 16
    assert found.seconds >= 3 * 16 * fullest_rank(layers, 16)
