"""Bytes that a rank of a pipeline needs, by the prices of its stages: as many as the list of its actions holds."""
import random

import numpy as np
import pytest

from autoshard.pipeline.action_lists.play import held
from autoshard.pipeline.schedules import SCHEDULES, make_schedule
from autoshard.pipeline.shapes.partitions import course_of
from autoshard.search.partition import chain_of_blocks, rank_bytes


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_waits_for_the_weight_part_may_be_more_than_what_forward_keeps(schedule):
    """Where backward recomputes, it is."""
    for seed in range(40):
        rng = random.Random(seed)
        chunks = rng.choice([c for c in (1, 2, 4) if c in SCHEDULES[schedule].chunks])
        table = make_schedule(schedule, rng.randint(1, 4), rng.randint(1, 9), chunks)
        saved, between = ([rng.choice([0.0, rng.uniform(0.0, 2.0)]) for _ in range(table.stages)] for _ in range(2))
        chain = chain_of_blocks([1.0] * table.stages, [2.0] * table.stages, saved=saved, between=between)
        needed = rank_bytes(chain, course_of(table), np.arange(table.stages + 1)[None])[0]
        assert needed == pytest.approx(held(table, saved, between))
