"""What the formulas of all collectives are made of: latencies, overhead and bandwidth of an axis with levels.

The symbols are those of `collectives/__init__.py`."""
from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2
from typing import Protocol

import numpy as np


class InNetwork(Protocol):
    """What a reduction in the switch reaches: see `cost.cluster.InNetwork`."""

    @property
    def overhead(self) -> float: ...
    @property
    def bandwidth(self) -> float: ...


class OneShot(Protocol):
    """What kernels of one step reach: see `cost.cluster.OneShot`."""

    @property
    def overhead(self) -> float: ...
    @property
    def up_to(self) -> float: ...


class Link(Protocol):
    """One level of the network, as formulas see it: see `cost.cluster.Link`."""

    @property
    def name(self) -> str: ...
    @property
    def latency(self) -> float: ...
    @property
    def overhead(self) -> float: ...
    @property
    def bus_bandwidth(self) -> float: ...
    @property
    def in_network(self) -> InNetwork | None: ...
    @property
    def one_shot(self) -> OneShot | None: ...
    def curve_of(self, kind: str) -> Callable[[np.ndarray], np.ndarray] | None: ...


class Axis(Protocol):
    """The links that one mesh axis uses: see `cost.cluster.AxisLink`."""

    @property
    def levels(self) -> "Levels": ...
    @property
    def size(self) -> int: ...


Levels = tuple[tuple[Link, int], ...]
"""(link, ranks along it) pairs, innermost first."""


def flat(kind: str, wire: np.ndarray, levels: Levels, passes: int, share: float) -> np.ndarray:
    """min of o + passes x A_ring + wire/B and o + passes x A_log + wire/(share x B), one algorithm over all ranks; the
    first alone on measured links, whose curves hold the library's choice."""
    ring = passes * ring_latency(levels) + on_the_wire(kind, wire, levels)
    if any(link.curve_of(kind) for link, _ in levels):
        return ring
    return np.minimum(ring, passes * log_latency(levels) + overhead(levels) + wire / share / bandwidth(levels))


def one_shot(size: np.ndarray, sent: np.ndarray, levels: Levels, calls: int = 1) -> np.ndarray:
    """o" + sent/B per call, of kernels that reach into peers' memory: no steps, so no latency of steps. inf on more than one level, above
    the size that the kernels are for, and where there are none."""
    kernels = levels[0][0].one_shot
    if kernels is None or len(levels) > 1:
        return np.full_like(size, np.inf)
    return np.where(size <= kernels.up_to, calls * kernels.overhead + sent / levels[0][0].bus_bandwidth, np.inf)


def on_the_wire(kind: str, wire: np.ndarray, levels: Levels) -> np.ndarray:
    """o + W/B; on a measured level its curve stands for both, and the slowest level counts."""
    curves = [link.curve_of(kind) for link, _ in levels]
    if not any(curves):
        return overhead(levels) + wire / bandwidth(levels)
    parts, inside = [], 1
    for (link, n), curve in zip(levels, curves, strict=True):
        parts.append(curve(wire / inside) if curve else overhead(levels) + wire / inside / link.bus_bandwidth)
        inside *= n
    return np.maximum.reduce(parts)


def ranks(levels: Levels) -> int:
    out = 1
    for _, n in levels:
        out *= n
    return out


def overhead(levels: Levels) -> float:
    return levels[-1][0].overhead


def bandwidth(levels: Levels) -> float:
    best, inside = float("inf"), 1
    for link, n in levels:
        best = min(best, link.bus_bandwidth * inside)
        inside *= n
    return best


def ring_latency(levels: Levels) -> float:
    """Of the n - 1 hops of a ring, those between groups of one level use the link of the next."""
    total, groups = 0.0, ranks(levels)
    for link, n in levels:
        total += (groups - groups // n) * link.latency
        groups //= n
    return total


def log_latency(levels: Levels) -> float:
    return sum(ceil(log2(n)) * link.latency for link, n in levels)
