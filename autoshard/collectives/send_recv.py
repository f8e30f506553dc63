"""SendRecv: every rank sends its tensor to the next rank of the axis. Priced; no plan runs it."""
from __future__ import annotations

import numpy as np

from autoshard.collectives.kind import Collective
from autoshard.collectives.levels import Levels, on_the_wire


def seconds(size: np.ndarray, levels: Levels) -> np.ndarray:
    """To the next rank of the axis, the slowest pair: o + a + S/B of the outermost link, one card per device.

    8 H100, S = 1e9: 24e-6 + 1.9e-6 + 1e9 / 369e9 = 2.736 ms.  2 nodes: 60e-6 + 4e-6 + 1e9 / 46e9 = 21.803 ms."""
    return levels[-1][0].latency + on_the_wire("send_recv", size, levels[-1:])


SEND_RECV = Collective("send_recv", "SendRecv", counted="in", seconds=seconds, per_byte=lambda n: 1.0, steps=lambda n: 1)
