"""What goes over the links: bytes and utilisation per level, and the distribution of the sizes of transfers."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from autoshard.simulation.program import Call


@dataclass(frozen=True)
class LinkUse:
    """One level of links, for one rank: `nbytes` that it sends in a step, by the algorithm that is priced; `busy_s`: seconds in which it
    sends, latencies left out; `utilisation`: of its bandwidth, over the step."""

    link: str
    nbytes: float
    busy_s: float
    utilisation: float


@dataclass(frozen=True)
class Size:
    """Calls of one kind, axis and window whose buffers have `least` bytes or more and less than twice as many. `nbytes`: of all of them."""

    kind: str
    axis: str
    window: str
    least: int
    calls: int
    nbytes: int


def link_use(calls: Iterable[Call], step_s: float) -> tuple[LinkUse, ...]:
    """In the order in which links are first used."""
    sent: dict[str, float] = {}
    busy: dict[str, float] = {}
    for phase in (phase for call in calls for group in call.phases for phase in group):
        sent[phase.link] = sent.get(phase.link, 0.0) + phase.wire
        busy[phase.link] = busy.get(phase.link, 0.0) + phase.wire / phase.rate
    return tuple(LinkUse(link, sent[link], busy[link], busy[link] / step_s if step_s else 0.0) for link in sent)


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
