"""AllReduce: all ranks' tensors are combined, and every rank gets the result."""
from __future__ import annotations

import numpy as np

from autoshard import _torch
from autoshard.base.spec import R, is_partial
from autoshard.collectives.all_gather import seconds as all_gather_seconds
from autoshard.collectives.exchange import Exchange
from autoshard.collectives.kind import Collective
from autoshard.collectives.levels import Levels, bandwidth, flat, log_latency, one_shot, overhead, ranks
from autoshard.collectives.reduce_scatter import seconds as reduce_scatter_seconds


def seconds(size: np.ndarray, levels: Levels) -> np.ndarray:
    """min of   ring       o + 2 A_ring + W/B          W = 2 (n-1)/n S
                tree       o + 2 A_log + 2 S/B
                in switch  see `_in_network`
                one shot   o" + (n-1) S/B, or in two steps 2 o" + 2 (n-1)/n S/B        S small, see `levels.one_shot`
                per level  reduce_scatter(S) inside, all_reduce(S/n_0) across nodes, all_gather(S) inside.

    8 H100, S = 1e9: in switch, 95e-6 + 1e9 / 275e9 = 3.731 ms; the ring would take 4.793.
    2 nodes, S = 1e9: in the switches of both, 60e-6 + 95e-6 + 2 x 9.7e-6 + 1e9 / 275e9 = 3.811 ms."""
    n = ranks(levels)
    best = flat("all_reduce", 2 * (n - 1) / n * size, levels, 2, (n - 1) / n)
    best = np.minimum(best, _in_network(size, levels))
    best = np.minimum(best, np.minimum(one_shot(size, (n - 1) * size, levels), one_shot(size, 2 * (n - 1) / n * size, levels, 2)))
    if len(levels) > 1:
        inside = reduce_scatter_seconds(size, levels[:1]) + all_gather_seconds(size, levels[:1])
        best = np.minimum(best, inside + seconds(size / levels[0][1], levels[1:]))
    return best


def _in_network(size: np.ndarray, levels: Levels) -> np.ndarray:
    """The innermost switch reduces: o' + S/B' on one level. On more, the nodes' results meet in double binary trees,
    pipelined with the switches (NCCL calls it NVLSTree), and the slower part counts:

        o + o' + 2 A_log + max(S/B', t S/(n_0 B_1))    t = 1 for two nodes, 2 for more: what a card sends in both trees

    inf where the switch cannot reduce."""
    (link, n), outer = levels[0], levels[1:]
    if link.in_network is None:
        return np.full_like(size, np.inf)
    inside = size / link.in_network.bandwidth
    if not outer:
        return link.in_network.overhead + inside
    across = (1 if ranks(outer) == 2 else 2) * size / n / bandwidth(outer)
    return overhead(outer) + link.in_network.overhead + 2 * log_latency(levels) + np.maximum(inside, across)


ALL_REDUCE = Collective(
    "all_reduce", "AllReduce", counted="in", seconds=seconds, per_byte=lambda n: 2 * (n - 1) / n, steps=lambda n: 2 * (n - 1),
    exchange=Exchange.REDUCE, target=_torch.functional_collective("all_reduce"), in_place=_torch.functional_collective("all_reduce_"),
    arguments=lambda rows, n, reduce_op: (reduce_op,), changes=lambda source, target: is_partial(source) and target == R)
