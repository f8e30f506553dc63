"""What goes over the links: bytes and utilisation per level, in a step and over its time, and the distribution of the sizes of transfers."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from autoshard.collectives.phases import Phases, alone
from autoshard.simulation.program import Call
from autoshard.simulation.replay import Replay

PARTS = 240
"""Equal parts of a step over which traffic is added up."""
EDGES = np.linspace(0.0, 1.0, PARTS + 1)


@dataclass(frozen=True)
class LinkUse:
    """One level of links, for one rank: `nbytes` that it sends in a step, by the algorithm that is priced; `busy_s`: seconds in which it
    sends, latencies left out; `utilisation`: of its bandwidth, over the step."""

    link: str
    nbytes: float
    busy_s: float
    utilisation: float


@dataclass(frozen=True)
class LinkTime:
    """One level of links over the step of one rank, in equal parts of `part_s` seconds: the bytes that it sends in each, and the utilisation."""

    link: str
    part_s: float
    nbytes: tuple[float, ...]
    utilisation: tuple[float, ...]


@dataclass(frozen=True)
class Size:
    """Calls of one kind, axis and window whose buffers have `least` bytes or more and less than twice as many. `nbytes`: of all of them."""

    kind: str
    axis: str
    window: str
    least: int
    calls: int
    nbytes: int


def link_use(collectives: Iterable[Phases], step_s: float) -> tuple[LinkUse, ...]:
    """In the order in which links are first used."""
    sent: dict[str, float] = {}
    busy: dict[str, float] = {}
    for phase in (phase for groups in collectives for group in groups for phase in group):
        sent[phase.link] = sent.get(phase.link, 0.0) + phase.wire
        busy[phase.link] = busy.get(phase.link, 0.0) + phase.wire / phase.rate
    return tuple(LinkUse(link, sent[link], busy[link], busy[link] / step_s if step_s else 0.0) for link in sent)


def over_time(played: Replay, rank: int = 0) -> tuple[LinkTime, ...]:
    """Of a rank, the bytes of every collective spread evenly over the time of their phases."""
    step = played.step_s
    found: dict[str, np.ndarray] = {}
    for at, running in played.calls.items():
        call = played.program.events[at]
        assert isinstance(call, Call), "calls are calls"
        begin, end = (float(np.broadcast_to(t, played.finish.shape).flat[rank]) for t in (running.start, running.end))
        total = alone(call.phases)
        for group in call.phases:
            until = begin + (end - begin) * (alone((group,)) / total if total else 0.0)
            share = _shares(begin / step, until / step)
            for phase in group:
                found.setdefault(phase.link, np.zeros((2, PARTS)))[:] += np.outer((phase.wire, phase.wire / phase.rate), share)
            begin, total = until, total - alone((group,))
    return tuple(LinkTime(link, step / PARTS, tuple(sent.tolist()), tuple((busy / (step / PARTS)).tolist())) for link, (sent, busy) in found.items())


def _shares(begin: float, end: float) -> np.ndarray:
    """Of something from `begin` to `end` (0 to 1), the share in each part; all of it in one where it takes no time."""
    if end <= begin:
        return np.eye(PARTS)[min(int(begin * PARTS), PARTS - 1)]
    return np.diff(np.clip(EDGES, begin, end)) / (end - begin)


def sizes(calls: Iterable[Call]) -> tuple[Size, ...]:
    """By kind, axis and window, small ones first; calls of 0 bytes are none."""
    found: Counter[tuple[str, str, str, int]] = Counter()
    moved: Counter[tuple[str, str, str, int]] = Counter()
    for call in calls:
        if call.nbytes:
            key = (call.kind, call.axis, call.window, 1 << (call.nbytes.bit_length() - 1))
            found[key] += 1
            moved[key] += call.nbytes
    return tuple(Size(*key, found[key], moved[key]) for key in sorted(found))
