"""Broadcast: every rank gets the tensor of one. Priced; no plan runs it."""
from __future__ import annotations

from math import ceil, log2

import numpy as np

from autoshard.collectives.kind import Collective
from autoshard.collectives.levels import Levels, log_latency, on_the_wire


def seconds(size: np.ndarray, levels: Levels) -> np.ndarray:
    """Pipelined tree: o + A_log + S/B.   8 H100, S = 1e9: 24e-6 + 3 x 1.9e-6 + 1e9 / 369e9 = 2.740 ms."""
    return log_latency(levels) + on_the_wire("broadcast", size, levels)


BROADCAST = Collective("broadcast", "Broadcast", counted="in", seconds=seconds, per_byte=lambda n: 1.0, steps=lambda n: ceil(log2(n)))
