"""HalfGather: AllGather that sends every piece in two halves. Made up, to try what a kind takes."""
from __future__ import annotations

import numpy as np

from autoshard import _torch
from autoshard.base.spec import R, is_shard
from autoshard.collectives import all_gather
from autoshard.collectives.kind import Collective
from autoshard.collectives.levels import Levels


def seconds(size: np.ndarray, levels: Levels) -> np.ndarray:
    """Two gathers of half the bytes."""
    return 2 * all_gather.seconds(size / 2, levels, "half_gather")


HALF_GATHER = Collective(
    "half_gather", "HalfGather", counted="out", seconds=seconds, per_byte=lambda n: (n - 1) / n, steps=lambda n: 2 * (n - 1),
    target=_torch.COLLECTIVES["half_gather"], arguments=lambda rows, n, reduce_op: (n,), rows=lambda rows, n: rows * n,
    reference=all_gather.reference, changes=lambda source, target: is_shard(source) and target == R,
    before=all_gather.before, after=all_gather.after)
