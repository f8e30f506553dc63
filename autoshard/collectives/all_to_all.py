"""AllToAll: every rank sends a piece of its tensor to every rank."""
from __future__ import annotations

from math import ceil, log2
from typing import Any

import numpy as np

from autoshard import _torch
from autoshard.base.spec import is_shard
from autoshard.collectives.exchange import Exchange
from autoshard.collectives.kind import Collective, Emitter
from autoshard.collectives.levels import Levels, one_shot, overhead


def seconds(size: np.ndarray, levels: Levels) -> np.ndarray:
    """o + sum over levels of the min of   direct  (n_l-1) a_l + (n_l-1)/n_l S/B_l
                                           Bruck   ceil(log2 n_l) a_l + ceil(log2 n_l)/2 S/B_l
                                           one shot  o" + (n_l-1)/n_l S/B_l    S small, see `levels.one_shot`; without o on one level

    Nothing is shared between ranks, so across nodes every device's bytes pass its own network card.
    8 H100, S = 1e9: direct, 2.409 ms.  2 nodes, S = 1e9: 13.318 ms."""
    total = np.zeros_like(size) if levels[-1][0].curve_of("all_to_all") else np.full_like(size, overhead(levels))
    for link, n in levels:
        curve, direct = link.curve_of("all_to_all"), (n - 1) * link.latency
        if curve is not None:
            total = total + direct + curve((n - 1) / n * size)
            continue
        rounds, per_byte = ceil(log2(n)), size / link.bus_bandwidth
        best = np.minimum(direct + (n - 1) / n * per_byte, rounds * link.latency + rounds / 2 * per_byte)
        total = total + np.minimum(best, one_shot(size, (n - 1) / n * size, ((link, n),)))
    return total if len(levels) > 1 else np.minimum(total, one_shot(size, (levels[0][1] - 1) / levels[0][1] * size, levels))


def before(emit: Emitter, x: Any, step: Any, n: int) -> Any:
    return emit.cut(x, step.dst_dim, n)


def after(emit: Emitter, y: Any, step: Any, n: int) -> Any:
    return emit.join(y, step.src_dim)


ALL_TO_ALL = Collective(
    "all_to_all", "AllToAll", counted="in", seconds=seconds, per_byte=lambda n: (n - 1) / n, steps=lambda n: n - 1,
    exchange=Exchange.TRANSPOSE, target=_torch.functional_collective("all_to_all_single"),
    arguments=lambda rows, n, reduce_op: ([rows // n] * n, [rows // n] * n),
    changes=lambda source, target: is_shard(source) and is_shard(target), before=before, after=after)
