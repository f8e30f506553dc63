"""What a collective does on which link, and when: its formula taken apart, for whoever plays it on links that are slower than the profile says.

A collective is groups of phases, one group after the other. The phases of a group run at the same time on different links, as a ring over
several nodes does, so the slowest of them counts. Alone on links as the profile has them, the seconds of all groups add up to the formula
(tests/collectives/test_phases.py): the algorithm is the cheapest one there, and stays so when a link is slower.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, log2

import numpy as np

from autoshard.collectives import KINDS, seconds, wire_bytes
from autoshard.collectives.all_gather import LOW_LATENCY_BANDWIDTH
from autoshard.collectives.levels import Axis, Levels, Link, log_latency, overhead, ranks, ring_latency
from autoshard.errors import ClusterError


@dataclass(frozen=True)
class Phase:
    """Work on one level of links: `fixed` seconds of latencies and overhead, then `wire` bytes of every rank at `rate` bytes/s."""

    link: str
    fixed: float
    wire: float
    rate: float

    def seconds(self, share: float | np.ndarray = 1.0) -> float | np.ndarray:
        """On a link that has `share` of its bandwidth."""
        return self.fixed + self.wire / (self.rate * share)


Group = tuple[Phase, ...]
Phases = tuple[Group, ...]


def phases(kind: str, nbytes: float, axis: Axis) -> Phases:
    """The phases of `collectives.seconds(kind, nbytes, axis)`; none on one rank and for 0 bytes. Raises ClusterError for an unknown kind."""
    if kind not in KINDS:
        raise ClusterError(f"no formula for collective {kind!r}; there are {', '.join(KINDS)}")
    if not (nbytes > 0 and axis.size > 1):
        return ()
    return _PHASES[kind](float(nbytes), axis.levels) if kind in _PHASES else _whole(kind, float(nbytes), axis)


def scaled(groups: Phases, factor: float) -> Phases:
    """All of it `factor` times as long: what the busiest rank of a group sends, over an even load."""
    return groups if factor == 1.0 else tuple(tuple(replace(p, fixed=p.fixed * factor, wire=p.wire * factor) for p in group) for group in groups)


def alone(groups: Phases) -> float:
    """Seconds on links as the profile has them."""
    return float(sum(max(phase.seconds() for phase in group) for group in groups))


def _whole(kind: str, nbytes: float, axis: Axis) -> Phases:
    """Of a kind that nobody has taken apart: all of it on the outermost link."""
    link, wire, total = axis.levels[-1][0], wire_bytes(kind, nbytes, axis.size), seconds(kind, nbytes, axis)
    moving = min(wire / link.bus_bandwidth, total)
    return ((Phase(link.name, total - moving, wire, wire / moving if moving else link.bus_bandwidth),),)


def _cheapest(*algorithms: Phases) -> Phases:
    return min(algorithms, key=alone)


def _flat(kind: str, wire: float, levels: Levels, passes: int, share: float) -> Phases:
    """`levels.flat`: a ring over all ranks, or the logarithmic algorithm."""
    ring = (_together(kind, wire, levels, passes * ring_latency(levels)),)
    if any(link.curve_of(kind) for link, _ in levels):
        return ring
    logarithmic = tuple(Phase(link.name, passes * log_latency(levels) + overhead(levels), sent, share * link.bus_bandwidth)
                        for link, sent in _sent(wire, levels))
    return _cheapest(ring, (logarithmic,))


def _together(kind: str, wire: float, levels: Levels, latency: float) -> Group:
    """`levels.on_the_wire`, with a latency: on a measured level what its curve has besides the bytes at bus bandwidth is fixed."""
    out = []
    for link, sent in _sent(wire, levels):
        curve = link.curve_of(kind)
        out.append(_measured(link, curve, sent, latency) if curve else Phase(link.name, latency + overhead(levels), sent, link.bus_bandwidth))
    return tuple(out)


def _measured(link: Link, curve: Callable[[np.ndarray], np.ndarray], wire: float, latency: float) -> Phase:
    total = float(curve(np.asarray(wire)))
    moving = min(wire / link.bus_bandwidth, total)
    return Phase(link.name, latency + total - moving, wire, wire / moving if moving else link.bus_bandwidth)


def _sent(wire: float, levels: Levels) -> list[tuple[Link, float]]:
    """Bytes that a rank sends on each level: a card of a node carries its device's part."""
    out, inside = [], 1
    for link, n in levels:
        out.append((link, wire / inside))
        inside *= n
    return out


def _one_shot(size: float, sent: float, levels: Levels, calls: int = 1) -> list[Phases]:
    """`levels.one_shot`."""
    link, kernels = levels[0][0], levels[0][0].one_shot
    if kernels is None or len(levels) > 1 or size > kernels.up_to:
        return []
    return [((Phase(link.name, calls * kernels.overhead, sent, link.bus_bandwidth),),)]


def _gather(kind: str) -> Callable[[float, Levels], Phases]:
    def of(size: float, levels: Levels) -> Phases:
        wire = wire_bytes(kind, size, ranks(levels))
        flat = _flat(kind, wire, levels, 1, LOW_LATENCY_BANDWIDTH)
        if len(levels) == 1:
            return _cheapest(flat, *_one_shot(size, wire, levels))
        return _cheapest(flat, of(size / levels[0][1], levels[1:]) + of(size, levels[:1]))

    return of


def _all_reduce(size: float, levels: Levels) -> Phases:
    n = ranks(levels)
    found = [_flat("all_reduce", wire_bytes("all_reduce", size, n), levels, 2, (n - 1) / n), *_in_network(size, levels),
             *_one_shot(size, (n - 1) * size, levels), *_one_shot(size, wire_bytes("all_reduce", size, n), levels, 2)]
    if len(levels) > 1:
        scatter, gather = (_PHASES[kind](size, levels[:1]) for kind in ("reduce_scatter", "all_gather"))
        found.append(scatter + _all_reduce(size / levels[0][1], levels[1:]) + gather)
    return _cheapest(*found)


def _in_network(size: float, levels: Levels) -> list[Phases]:
    (link, n), outer = levels[0], levels[1:]
    if link.in_network is None:
        return []
    fixed, rate = link.in_network.overhead, link.in_network.bandwidth
    if not outer:
        return [((Phase(link.name, fixed, size, rate),),)]
    fixed += overhead(outer) + 2 * log_latency(levels)
    across = (1 if ranks(outer) == 2 else 2) * size / n
    return [((Phase(link.name, fixed, size, rate), *(Phase(o.name, fixed, sent, o.bus_bandwidth) for o, sent in _sent(across, outer))),)]


def _all_to_all(size: float, levels: Levels) -> Phases:
    """Level by level; the call's overhead comes before the first."""
    out, before = [], 0.0 if levels[-1][0].curve_of("all_to_all") else overhead(levels)
    for link, n in levels:
        curve, rounds, wire = link.curve_of("all_to_all"), ceil(log2(n)), (n - 1) / n * size
        if curve is not None:
            out.append((_measured(link, curve, wire, before + (n - 1) * link.latency),))
        else:
            direct = Phase(link.name, before + (n - 1) * link.latency, wire, link.bus_bandwidth)
            bruck = Phase(link.name, before + rounds * link.latency, rounds / 2 * size, link.bus_bandwidth)
            kernels = [replace(group[0], fixed=before + group[0].fixed) for (group,) in _one_shot(size, wire, ((link, n),))]
            out.append((min(direct, bruck, *kernels, key=Phase.seconds),))
        before = 0.0
    return tuple(out) if len(levels) > 1 else _cheapest(tuple(out), *_one_shot(size, wire_bytes("all_to_all", size, levels[0][1]), levels))


def _broadcast(size: float, levels: Levels) -> Phases:
    return (_together("broadcast", size, levels, log_latency(levels)),)


def _pairs(kind: str) -> Callable[[float, Levels], Phases]:
    """Every rank sends to one other, the slowest pairs over the outermost link."""
    return lambda size, levels: (_together(kind, size, levels[-1:], levels[-1][0].latency),)


_PHASES: dict[str, Callable[[float, Levels], Phases]] = {
    "all_gather": _gather("all_gather"), "reduce_scatter": _gather("reduce_scatter"), "all_reduce": _all_reduce, "all_to_all": _all_to_all,
    "all_to_all_rows": _all_to_all, "broadcast": _broadcast, "send_recv": _pairs("send_recv"), "mirror": _pairs("mirror")}
