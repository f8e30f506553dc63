"""Mirror: rank r of n gets the tensor of rank n - 1 - r. What is dear at the end of a sequence meets what is cheap at its beginning."""
from __future__ import annotations

import numpy as np
import torch

from autoshard import _torch
from autoshard.base.custom_op import custom_op
from autoshard.collectives.exchange import Exchange
from autoshard.collectives.kind import Collective
from autoshard.collectives.levels import Levels, on_the_wire


def seconds(size: np.ndarray, levels: Levels) -> np.ndarray:
    """The first and the last rank, the slowest pair: o + a + S/B of the outermost link, one card per device.

    8 H100, S = 1e9: 24e-6 + 1.9e-6 + 1e9 / 369e9 = 2.736 ms.  2 nodes: 60e-6 + 4e-6 + 1e9 / 46e9 = 21.803 ms."""
    return levels[-1][0].latency + on_the_wire("mirror", size, levels[-1:])


def run(x: torch.Tensor, group: str) -> torch.Tensor:
    """An all-to-all in which a rank sends to one other."""
    members = _torch.process_group(group)
    rows = [0] * members.size()
    rows[members.size() - 1 - members.rank()] = x.shape[0]
    return _torch.WAIT(_torch.functional_collective("all_to_all_single")(x.contiguous(), rows, rows, group))


MIRROR = Collective(
    "mirror", "Mirror", counted="in", seconds=seconds, per_byte=lambda n: 1.0, steps=lambda n: 1, exchange=Exchange.MIRROR,
    target=custom_op("mirror", "(Tensor x, str group) -> Tensor", run, lambda x, group: torch.empty_like(x)))
