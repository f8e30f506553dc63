"""Seconds of one collective over one mesh axis: alpha-beta models, the cheapest algorithm as a library would pick.

**Bytes convention**, per rank, used everywhere (plans, reports, run-time checks): `nbytes` is
    all_gather                          the OUTPUT buffer (n times the local input)
    reduce_scatter                      the INPUT buffer (n times the local output)
    all_reduce, all_to_all, broadcast   the local buffer (input and output have the same size)
    send_recv                           the buffer one rank sends while it receives another

**Symbols**: S = nbytes, n = ranks; a link has o = overhead (s per call), a = latency (s per step) and
B = bandwidth x efficiency / oversubscription (bytes/s, the bus bandwidth of nccl-tests). On an axis with levels
(link_0, n_0), (link_1, n_1), ... (innermost first) a flat algorithm runs over all n = n_0 n_1 ... ranks:
    A_ring = (n - m) a_0 + (m - 1) a_1    with m = n_1 nodes: of n - 1 hops m - 1 cross nodes
    A_log  = sum_l ceil(log2 n_l) a_l
    W/B    = max_l W / (B_l n_0 ... n_(l-1))    W bytes on the wire; every device of a node has its own network card
and o is that of the outermost link. Besides, "per level" runs the collective once on each level.

**Measured links**: where the profile holds a curve for a collective (`autoshard calibrate` writes them), curve(W) stands
for o + W/B on that level, and the ring's latency for all of the library's choices: the curve has them in it.

**In-network reduction**: a switch that reduces (o', B' of the link) sends every byte once to and once from each device, so
its all_reduce takes o' + S/B' however many ranks there are.

**Sources**: bus bandwidth, (n-1)/n and 2(n-1)/n: nccl-tests, doc/PERFORMANCE.md. Hop counts of ring and tree: NCCL,
src/graph/tuning.cc. Logarithmic gather and scatter, Bruck and direct all-to-all: Thakur, Rabenseifner, Gropp,
"Optimization of Collective Communication Operations in MPICH", IJHPCA 2005. Double binary trees: Sanders, Speck, Traeff,
"Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 35, 2009.

Properties (tests/cost/test_collectives.py): 0 on one rank; monotone in bytes and, for axes aligned with nodes, in
ranks; an all_reduce costs between max(rs, ag) and rs + ag where no curve says otherwise; for the same local input an
all_to_all (S) costs no more than an all_gather (n S). At equal *nbytes* across nodes it may cost more: each byte of an
all_to_all crosses the network once per rank, a gathered one once per node.
"""
from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2
from typing import Literal, overload

import numpy as np

from autoshard.cost.cluster import AxisLink, Link
from autoshard.errors import ClusterError

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send_recv"]
Levels = tuple[tuple[Link, int], ...]

# Low-latency protocols send a flag beside every word of data, so half of what travels is data.
LOW_LATENCY_BANDWIDTH = 0.5


@overload
def seconds(kind: Kind, nbytes: float, axis: AxisLink) -> float: ...
@overload
def seconds(kind: Kind, nbytes: np.ndarray, axis: AxisLink) -> np.ndarray: ...
def seconds(kind: Kind, nbytes: float | np.ndarray, axis: AxisLink) -> float | np.ndarray:
    """Seconds of collective `kind` with `nbytes` (convention above; an array gives an array) over `axis`.

    0 on one rank, and for 0 bytes: nothing is sent then. Raises ClusterError for an unknown kind.

    >>> seconds("all_gather", 1e9, axis)   # 8 H100 on NVLink: 24e-6 + 7 x 1.9e-6 + 7/8 x 1e9 / 369e9 = 2.409 ms
    """
    if kind not in FORMULAS:
        raise ClusterError(f"no formula for collective {kind!r}; there are {', '.join(FORMULAS)}")
    size = np.asarray(nbytes, dtype=np.float64)
    out = np.where(size > 0, FORMULAS[kind](size, axis.levels), 0.0) if axis.size > 1 else np.zeros_like(size)
    return out if size.ndim else float(out)


def all_gather(size: np.ndarray, levels: Levels, kind: str = "all_gather") -> np.ndarray:
    """min of   ring       o + A_ring + W/B            W = (n-1)/n S
                log        o + A_log  + W/(B/2)
                per level  all_gather(S/n_0) across nodes, then all_gather(S) inside.

    8 H100, S = 1e9: ring, 2.409 ms.  2 nodes, S = 1e9: ring, B = min(369e9, 8 x 46e9) = 368e9: 2.638 ms."""
    n = ranks(levels)
    best = _flat(kind, (n - 1) / n * size, levels, 1, LOW_LATENCY_BANDWIDTH)
    if len(levels) > 1:
        best = np.minimum(best, all_gather(size / levels[0][1], levels[1:], kind) + all_gather(size, levels[:1], kind))
    return best


def reduce_scatter(size: np.ndarray, levels: Levels) -> np.ndarray:
    """The same steps as `all_gather` in reverse order, hence the same seconds for S = the input buffer.

    8 H100, S = 1e9: 2.409 ms."""
    return all_gather(size, levels, "reduce_scatter")


def all_reduce(size: np.ndarray, levels: Levels) -> np.ndarray:
    """min of   ring       o + 2 A_ring + W/B          W = 2 (n-1)/n S
                tree       o + 2 A_log + 2 S/B
                in switch  see `_in_network`
                per level  reduce_scatter(S) inside, all_reduce(S/n_0) across nodes, all_gather(S) inside.

    8 H100, S = 1e9: in switch, 95e-6 + 1e9 / 275e9 = 3.731 ms; the ring would take 4.793.
    2 nodes, S = 1e9: in the switches of both, 60e-6 + 95e-6 + 2 x 9.7e-6 + 1e9 / 275e9 = 3.811 ms."""
    n = ranks(levels)
    best = _flat("all_reduce", 2 * (n - 1) / n * size, levels, 2, (n - 1) / n)
    best = np.minimum(best, _in_network(size, levels))
    if len(levels) > 1:
        inside = reduce_scatter(size, levels[:1]) + all_gather(size, levels[:1])
        best = np.minimum(best, inside + all_reduce(size / levels[0][1], levels[1:]))
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
    across = (1 if ranks(outer) == 2 else 2) * size / n / _bandwidth(outer)
    return _overhead(outer) + link.in_network.overhead + 2 * _log_latency(levels) + np.maximum(inside, across)


def all_to_all(size: np.ndarray, levels: Levels) -> np.ndarray:
    """o + sum over levels of the min of   direct  (n_l-1) a_l + (n_l-1)/n_l S/B_l
                                           Bruck   ceil(log2 n_l) a_l + ceil(log2 n_l)/2 S/B_l

    Nothing is shared between ranks, so across nodes every device's bytes pass its own network card.
    8 H100, S = 1e9: direct, 2.409 ms.  2 nodes, S = 1e9: 13.318 ms."""
    total = np.zeros_like(size) if levels[-1][0].curve_of("all_to_all") else np.full_like(size, _overhead(levels))
    for link, n in levels:
        curve, direct = link.curve_of("all_to_all"), (n - 1) * link.latency
        if curve is not None:
            total = total + direct + curve((n - 1) / n * size)
            continue
        rounds, per_byte = ceil(log2(n)), size / link.bus_bandwidth
        total = total + np.minimum(direct + (n - 1) / n * per_byte, rounds * link.latency + rounds / 2 * per_byte)
    return total


def broadcast(size: np.ndarray, levels: Levels) -> np.ndarray:
    """Pipelined tree: o + A_log + S/B.   8 H100, S = 1e9: 24e-6 + 3 x 1.9e-6 + 1e9 / 369e9 = 2.740 ms."""
    return _log_latency(levels) + _wire("broadcast", size, levels)


def send_recv(size: np.ndarray, levels: Levels) -> np.ndarray:
    """To the next rank of the axis, the slowest pair: o + a + S/B of the outermost link, one card per device.

    8 H100, S = 1e9: 24e-6 + 1.9e-6 + 1e9 / 369e9 = 2.736 ms.  2 nodes: 60e-6 + 4e-6 + 1e9 / 46e9 = 21.803 ms."""
    return levels[-1][0].latency + _wire("send_recv", size, levels[-1:])


FORMULAS: dict[str, Callable[[np.ndarray, Levels], np.ndarray]] = {
    f.__name__: f for f in (all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, send_recv)}


def _flat(kind: str, wire: np.ndarray, levels: Levels, passes: int, share: float) -> np.ndarray:
    """min of o + passes x A_ring + wire/B and o + passes x A_log + wire/(share x B), one algorithm over all ranks; the
    first alone on measured links, whose curves hold the library's choice."""
    ring = passes * _ring_latency(levels) + _wire(kind, wire, levels)
    if any(link.curve_of(kind) for link, _ in levels):
        return ring
    return np.minimum(ring, passes * _log_latency(levels) + _overhead(levels) + wire / share / _bandwidth(levels))


def _wire(kind: str, wire: np.ndarray, levels: Levels) -> np.ndarray:
    """o + W/B; on a measured level its curve stands for both, and the slowest level counts."""
    curves = [link.curve_of(kind) for link, _ in levels]
    if not any(curves):
        return _overhead(levels) + wire / _bandwidth(levels)
    parts, inside = [], 1
    for (link, n), curve in zip(levels, curves, strict=True):
        parts.append(curve(wire / inside) if curve else _overhead(levels) + wire / inside / link.bus_bandwidth)
        inside *= n
    return np.maximum.reduce(parts)


def wire_bytes(kind: str, nbytes: float, n: int) -> float:
    """W: bytes one rank sends in a ring of `n`, what a measured curve is a function of."""
    factor = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0, "send_recv": 1.0}
    return nbytes * factor.get(kind, (n - 1) / n)


def ring_steps(kind: str, n: int) -> int:
    """Steps that pay a link's latency when measured curves are used: a curve holds what is left without them."""
    return {"all_reduce": 2 * (n - 1), "broadcast": ceil(log2(n)), "send_recv": 1}.get(kind, n - 1)


def ranks(levels: Levels) -> int:
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
    total, groups = 0.0, ranks(levels)
    for link, n in levels:
        total += (groups - groups // n) * link.latency
        groups //= n
    return total


def _log_latency(levels: Levels) -> float:
    return sum(ceil(log2(n)) * link.latency for link, n in levels)
