"""What goes over the links: bytes and utilisation per level, in a step and over its time, and the distribution of the sizes of transfers."""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from autoshard.collectives.phases import Phases, alone
from autoshard.simulation.program import Call
from autoshard.simulation.replay import Replay

PARTS = 240
"""Equal parts of a step over which traffic is added up."""
EDGES = np.linspace(0.0, 1.0, PARTS + 1)
AT_ONCE = 4096
"""Transfers that are spread in one go."""


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


@dataclass(frozen=True)
class Sending:
    """A rank sends: from `begin` to `end` seconds after the step began, the phases of a collective or of a message one after the other."""

    begin: float
    end: float
    phases: Phases


def sendings(played: Replay, rank: int = 0, at: float = 0.0) -> Iterator[Sending]:
    """The collectives of a rank in a program that begins at `at`."""
    for number, running in played.calls.items():
        call = played.program.events[number]
        assert isinstance(call, Call), "calls are calls"
        begin, end = (float(np.broadcast_to(t, played.finish.shape).flat[rank]) for t in (running.start, running.end))
        yield Sending(at + begin, at + end, call.phases)


def over_time(sent: Iterable[Sending], step_s: float) -> tuple[LinkTime, ...]:
    """What a rank sends in a step of `step_s`, every phase spread evenly over its time."""
    rows: dict[str, list[tuple[float, float, float, float]]] = defaultdict(list)  # begin, end, bytes, seconds
    for s in sent:
        begin, total = s.begin, alone(s.phases)
        for group in s.phases:
            until = begin + (s.end - s.begin) * (alone((group,)) / total if total else 0.0)
            for phase in group:
                rows[phase.link].append((begin, until, phase.wire, phase.wire / phase.rate))
            begin = until
    return tuple(_spread(link, np.array(of), step_s) for link, of in rows.items())


def _spread(link: str, rows: np.ndarray, step_s: float) -> LinkTime:
    part, sums = step_s / PARTS, np.zeros((2, PARTS))
    for some in np.array_split(rows, len(rows) // AT_ONCE + 1):
        begin, end = some[:, :1] / step_s, some[:, 1:2] / step_s
        begin = np.minimum(begin, np.where(end > begin, 1.0, EDGES[-2]))  # what takes no time at the very end is in the last part
        done = np.clip((EDGES - begin) / np.maximum(end - begin, np.finfo(float).tiny), 0.0, 1.0)
        sums += some[:, 2:].T @ np.diff(done, axis=1)
    return LinkTime(link, part, tuple(sums[0].tolist()), tuple((sums[1] / part).tolist()))


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
