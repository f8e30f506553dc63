"""What the step waits for: the chain of work and collectives, over ranks, without which it would end earlier.

It is followed back from the rank that ends last. Work leads to what the same rank did before. A wait that stops the rank leads to its
collective, and that to the rank of the group which came last; where this one was held up by an earlier call of its stream, to that call. The
legs follow each other without a gap, so their seconds are those of the step. Where the device waits for its host, the path is the host's: it
has issued ops since the step began.
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autoshard.simulation.program import Call, Host, Stretch, Wait
from autoshard.simulation.replay import Replay


@dataclass(frozen=True)
class Leg:
    """Event `at` of the program on flat rank `rank`, from `begin` to `end` seconds."""

    rank: int
    at: int
    begin: float
    end: float


@dataclass(frozen=True)
class Share:
    """Seconds of the critical path by what is done ("compute", "copy", "update", "host" or a kind of collective), over which axis, in which
    module (the numbers of repeated layers as *). `times`: how often."""

    what: str
    axis: str
    module: str
    seconds: float
    times: int


def critical_path(played: Replay) -> tuple[Leg, ...]:
    """From the start of the step to its end."""
    return tuple(_backwards(played))[::-1]


def _backwards(played: Replay) -> Iterator[Leg]:
    events, before, on_stream = played.program.events, _before(played), _earlier_calls(played)
    rank = int(np.argmax(played.finish))
    at = before[len(events)]
    while at >= 0:
        event, now = events[at], _at(played.clock[before[at]], rank) if before[at] >= 0 else 0.0
        if isinstance(event, Stretch):
            yield Leg(rank, at, now, _at(played.clock[at], rank))
            at = before[at]
        elif isinstance(event, Host) and event.seconds > now:
            yield Leg(rank, at, 0.0, event.seconds)
            return
        elif isinstance(event, Wait) and _at(played.clock[at], rank) > now:
            call: int | None = event.call
            while call is not None:
                running = played.calls[call]
                yield Leg(rank, call, _of(running.start, rank, played), _of(running.end, rank, played))
                rank = _last(played, call, rank)
                at = before[call]
                arrived = _at(played.clock[at], rank) if at >= 0 else 0.0
                call = on_stream.get(call) if arrived < _at(played.clock[call], rank) else None
        else:
            at = before[at]


def _before(played: Replay) -> list[int]:
    """Per event, and past the last, the position of the event before it on the compute stream, or -1."""
    out, last = [], -1
    for i, event in enumerate(played.program.events):
        out.append(last)
        last = last if isinstance(event, Call) else i
    return [*out, last]


def _earlier_calls(played: Replay) -> dict[int, int]:
    """Per call the one before it on its stream."""
    out: dict[int, int] = {}
    last: dict[str, int] = {}
    for i, event in enumerate(played.program.events):
        if isinstance(event, Call):
            if event.stream in last:
                out[i] = last[event.stream]
            last[event.stream] = i
    return out


def _last(played: Replay, call: int, rank: int) -> int:
    """The rank of the group that was ready last; the rank itself where it is one of several."""
    event, ready = played.program.events[call], played.clock[call]
    mesh = played.program.mesh
    assert isinstance(event, Call), "only calls have groups"
    own = mesh.coordinates(rank)
    group = tuple(slice(None) if i in event.axes else c for i, c in enumerate(own))
    if _at(ready, rank) == ready[group].max():
        return rank
    first = np.unravel_index(int(np.argmax(ready[group])), ready[group].shape)
    found = dict(zip(event.axes, first, strict=True))
    return mesh.rank_at([int(found.get(i, c)) for i, c in enumerate(own)])


def _at(array: np.ndarray, rank: int) -> float:
    return float(array.flat[rank])


def _of(array: np.ndarray, rank: int, played: Replay) -> float:
    return float(np.broadcast_to(array, played.program.mesh.sizes).flat[rank])


def shares(played: Replay, path: tuple[Leg, ...]) -> tuple[Share, ...]:
    """The path by what and where, the longest first."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for leg in path:
        event = played.program.events[leg.at]
        if isinstance(event, Call):
            found.setdefault((event.kind, event.axis, _folded(event.module)), []).append(leg.end - leg.begin)
        elif isinstance(event, Host):
            found.setdefault(("host", "", ""), []).append(leg.end - leg.begin)
        elif isinstance(event, Stretch) and event.seconds:
            for work in event.works:
                key = ("compute" if work.kind == "op" else work.kind, "", _folded(work.module))
                found.setdefault(key, []).append((leg.end - leg.begin) * work.seconds / event.seconds)
    rows = (Share(*key, sum(seconds), len(seconds)) for key, seconds in found.items())
    return tuple(sorted(rows, key=lambda s: (-s.seconds, s.what, s.axis, s.module)))


def _folded(module: str) -> str:
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", module)
