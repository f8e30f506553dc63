"""AllGather: every rank gets the pieces of all ranks, one after the other."""
from __future__ import annotations

from typing import Any

import numpy as np

from autoshard import _torch
from autoshard.base.spec import R, is_shard
from autoshard.collectives.exchange import Exchange
from autoshard.collectives.kind import Collective, Emitter
from autoshard.collectives.levels import Levels, flat, one_shot, ranks

LOW_LATENCY_BANDWIDTH = 0.5
"""Low-latency protocols send a flag beside every word of data, so half of what travels is data."""


def seconds(size: np.ndarray, levels: Levels, kind: str = "all_gather") -> np.ndarray:
    """min of   ring       o + A_ring + W/B            W = (n-1)/n S
                log        o + A_log  + W/(B/2)
                one shot   o" + W/B                    S small, see `levels.one_shot`
                per level  all_gather(S/n_0) across nodes, then all_gather(S) inside.

    8 H100, S = 1e9: ring, 2.409 ms.  2 nodes, S = 1e9: ring, B = min(369e9, 8 x 46e9) = 368e9: 2.638 ms."""
    n = ranks(levels)
    best = flat(kind, (n - 1) / n * size, levels, 1, LOW_LATENCY_BANDWIDTH)
    best = np.minimum(best, one_shot(size, (n - 1) / n * size, levels))
    if len(levels) > 1:
        best = np.minimum(best, seconds(size / levels[0][1], levels[1:], kind) + seconds(size, levels[:1], kind))
    return best


def before(emit: Emitter, x: Any, step: Any, n: int) -> Any:
    return emit.at_least_1d(x)


def after(emit: Emitter, y: Any, step: Any, n: int) -> Any:
    return emit.join(emit.split(y, 0, n), step.src_dim)


ALL_GATHER = Collective(
    "all_gather", "AllGather", counted="out", seconds=seconds, per_byte=lambda n: (n - 1) / n, steps=lambda n: n - 1,
    exchange=Exchange.GATHER, target=_torch.functional_collective("all_gather_into_tensor"), arguments=lambda rows, n, reduce_op: (n,),
    changes=lambda source, target: is_shard(source) and target == R, before=before, after=after)
