"""Seconds of one collective over one mesh axis: alpha-beta models, the cheapest algorithm as a library would pick.

**Bytes convention**, per rank, used everywhere (plans, reports, run-time checks): `nbytes` is
    all_gather                          the OUTPUT buffer (n times the local input)
    reduce_scatter                      the INPUT buffer (n times the local output)
    all_reduce, all_to_all, broadcast   the local buffer (input and output have the same size)

**Symbols**: S = nbytes, n = ranks; a link has o = overhead (s per call), a = latency (s per step) and
B = bandwidth x efficiency (bytes/s, the bus bandwidth of nccl-tests). On an axis with levels
(link_0, n_0), (link_1, n_1), ... (innermost first) a flat algorithm runs over all n = n_0 n_1 ... ranks:
    A_ring = (n - m) a_0 + (m - 1) a_1    with m = n_1 nodes: of n - 1 hops m - 1 cross nodes
    A_log  = sum_l ceil(log2 n_l) a_l
    B      = min_l B_l n_0 ... n_(l-1)    every device of a node has its own network card
and o is that of the outermost link. Besides, "per level" runs the collective once on each level.

**Sources**: bus bandwidth, (n-1)/n and 2(n-1)/n: nccl-tests, doc/PERFORMANCE.md. Hop counts of ring and tree: NCCL,
src/graph/tuning.cc. Logarithmic gather and scatter, Bruck and direct all-to-all: Thakur, Rabenseifner, Gropp,
"Optimization of Collective Communication Operations in MPICH", IJHPCA 2005.

Properties (tests/cost/test_collectives.py): 0 on one rank; monotone in bytes and, for axes aligned with nodes, in
ranks; an all_reduce costs between max(rs, ag) and rs + ag; for the same local input an all_to_all (S) costs no more
than an all_gather (n S). At equal *nbytes* across nodes it may cost more: each byte of an all_to_all crosses
the network once per rank, a gathered one once per node.
"""
from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2
from typing import Literal, overload

import numpy as np

from autoshard.cost.cluster import AxisLink, Link
from autoshard.errors import ClusterError

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]
Levels = tuple[tuple[Link, int], ...]

# Low-latency protocols send a flag beside every word of data, so half of what travels is data.
LOW_LATENCY_BANDWIDTH = 0.5


@overload
def seconds(kind: Kind, nbytes: float, axis: AxisLink) -> float: ...
@overload
def seconds(kind: Kind, nbytes: np.ndarray, axis: AxisLink) -> np.ndarray: ...
def seconds(kind: Kind, nbytes: float | np.ndarray, axis: AxisLink) -> float | np.ndarray:
    """Seconds of collective `kind` with `nbytes` (convention above; an array gives an array) over `axis`.

    0 on one rank. Raises ClusterError for an unknown kind.

    >>> seconds("all_gather", 1e9, axis)   # 8 H100 on NVLink: 8.4e-6 + 7 x 1.9e-6 + 7/8 x 1e9 / 369e9 = 2.393 ms
    """
    if kind not in FORMULAS:
        raise ClusterError(f"no formula for collective {kind!r}; there are {', '.join(FORMULAS)}")
    size = np.asarray(nbytes, dtype=np.float64)
    out = FORMULAS[kind](size, axis.levels) if axis.size > 1 else np.zeros_like(size)
    return out if size.ndim else float(out)


def all_gather(size: np.ndarray, levels: Levels) -> np.ndarray:
    """min of   ring       o + A_ring + (n-1)/n S/B
                log        o + A_log  + (n-1)/n S/(B/2)
                per level  all_gather(S/n_0) across nodes, then all_gather(S) inside.

    8 H100, S = 1e9: ring, 2.393 ms.  2 nodes, S = 1e9: ring, B = min(369e9, 8 x 46e9) = 368e9: 2.592 ms."""
    n = _ranks(levels)
    moved = (n - 1) / n * size / _bandwidth(levels)
    best = _overhead(levels) + np.minimum(_ring_latency(levels) + moved,
                                          _log_latency(levels) + moved / LOW_LATENCY_BANDWIDTH)
    if len(levels) > 1:
        best = np.minimum(best, all_gather(size / levels[0][1], levels[1:]) + all_gather(size, levels[:1]))
    return best


def reduce_scatter(size: np.ndarray, levels: Levels) -> np.ndarray:
    """The same steps as `all_gather` in reverse order, hence the same seconds for S = the input buffer.

    8 H100, S = 1e9: 2.393 ms."""
    return all_gather(size, levels)


def all_reduce(size: np.ndarray, levels: Levels) -> np.ndarray:
    """min of   ring       o + 2 A_ring + 2 (n-1)/n S/B
                tree       o + 2 A_log + 2 S/B
                per level  reduce_scatter(S) inside, all_reduce(S/n_0) across nodes, all_gather(S) inside.

    8 H100, S = 1e9: ring, 8.4e-6 + 14 x 1.9e-6 + 2 x 7/8 x 1e9 / 369e9 = 4.778 ms."""
    n, per_byte = _ranks(levels), size / _bandwidth(levels)
    best = _overhead(levels) + np.minimum(2 * _ring_latency(levels) + 2 * (n - 1) / n * per_byte,
                                          2 * _log_latency(levels) + 2 * per_byte)
    if len(levels) > 1:
        inside = reduce_scatter(size, levels[:1]) + all_gather(size, levels[:1])
        best = np.minimum(best, inside + all_reduce(size / levels[0][1], levels[1:]))
    return best


def all_to_all(size: np.ndarray, levels: Levels) -> np.ndarray:
    """o + sum over levels of the min of   direct  (n_l-1) a_l + (n_l-1)/n_l S/B_l
                                           Bruck   ceil(log2 n_l) a_l + ceil(log2 n_l)/2 S/B_l

    Nothing is shared between ranks, so across nodes every device's bytes pass its own network card.
    8 H100, S = 1e9: direct, 2.393 ms.  2 nodes, S = 1e9: 13.272 ms."""
    total = np.full_like(size, _overhead(levels))
    for link, n in levels:
        rounds, per_byte = ceil(log2(n)), size / link.bus_bandwidth
        total = total + np.minimum((n - 1) * link.latency + (n - 1) / n * per_byte,
                                   rounds * link.latency + rounds / 2 * per_byte)
    return total


def broadcast(size: np.ndarray, levels: Levels) -> np.ndarray:
    """Pipelined tree: o + A_log + S/B.   8 H100, S = 1e9: 8.4e-6 + 3 x 1.9e-6 + 1e9 / 369e9 = 2.724 ms."""
    return _overhead(levels) + _log_latency(levels) + size / _bandwidth(levels)


FORMULAS: dict[str, Callable[[np.ndarray, Levels], np.ndarray]] = {
    f.__name__: f for f in (all_gather, reduce_scatter, all_reduce, all_to_all, broadcast)}


def _ranks(levels: Levels) -> int:
    out = 1
    for _, n in levels:
        out *= n
    return out


def _overhead(levels: Levels) -> float:
    return levels[-1][0].overhead


def _bandwidth(levels: Levels) -> float:
    best, inside = float("inf"), 1
    for link, n in levels:
        best = min(best, link.bus_bandwidth * inside)
        inside *= n
    return best


def _ring_latency(levels: Levels) -> float:
    """Of the n - 1 hops of a ring, those between groups of one level use the link of the next."""
    total, groups = 0.0, _ranks(levels)
    for link, n in levels:
        total += (groups - groups // n) * link.latency
        groups //= n
    return total


def _log_latency(levels: Levels) -> float:
    return sum(ceil(log2(n)) * link.latency for link, n in levels)
