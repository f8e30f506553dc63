"""A simulation as a Chrome trace: JSON that ui.perfetto.dev and chrome://tracing open.

A process per rank that is shown, with a thread for its compute stream and one per stream of collectives; counters for memory and for
what the links carry. Ranks that did the same at the same times are shown once, by the first of them. Measured ranks (clocked.py) are
processes of their own, each below the simulated one of its number.
"""
from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from autoshard.base.files import write_atomically
from autoshard.errors import UsageError
from autoshard.simulation.program import Call, Host, Stretch, Wait
from autoshard.simulation.replay import Replay
from autoshard.simulation.traffic import LinkTime

MOST_TRACKS = 16
"""Ranks shown where the user names none."""
MOST_BYTES = 200 << 20
"""Of a trace file: viewers fail on larger ones."""
MICROSECONDS = 1e6
COMPUTE = "compute"
MEASURED = 1 << 20
"""Added to the number of a rank that was measured, for a process of its own."""


@dataclass(frozen=True)
class Span:
    """Something on a stream of a rank, from `begin` to `end` seconds."""

    stream: str
    name: str
    begin: float
    end: float
    category: str
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Track:
    """One rank. `title`: how it is called; `alike`: how many ranks did the same, itself included; `measured`: by the clock, not simulated."""

    rank: int
    title: str
    spans: tuple[Span, ...]
    alike: int = 1
    measured: bool = False

    @property
    def process(self) -> int:
        """Its number in a trace."""
        return self.rank + MEASURED * self.measured


def tracks_of(played: Replay, ranks: Sequence[int] = ()) -> tuple[Track, ...]:
    """Those of `ranks`; without any, one of each class of ranks that did the same."""
    return tuple(_track(played, rank, alike) for rank, alike in [(rank, 1) for rank in ranks] or _classes(played))


def _classes(played: Replay) -> list[tuple[int, int]]:
    """(first rank, how many did the same) of at most `MOST_TRACKS` classes: those of the first ranks and that of the last to end."""
    _, first, alike = np.unique(played.alike.ravel(), return_index=True, return_counts=True)
    found = sorted(zip(first.tolist(), alike.tolist(), strict=True))
    slowest = next(c for c in found if played.alike.flat[c[0]] == played.alike.flat[int(np.argmax(played.finish))])
    return sorted({*found[:MOST_TRACKS - 1], slowest})


def _track(played: Replay, rank: int, alike: int) -> Track:
    title = f"rank {rank}" + (f" and {alike - 1} like it" if alike > 1 else "")
    return Track(rank, title, tuple(_spans(played, rank)), alike)


def _spans(played: Replay, rank: int) -> Iterator[Span]:
    now = 0.0
    for at, (event, clock) in enumerate(zip(played.program.events, played.clock, strict=True)):
        then = float(clock.flat[rank])
        if isinstance(event, Call):
            start, end = (float(np.broadcast_to(t, clock.shape).flat[rank]) for t in (played.calls[at].start, played.calls[at].end))
            yield Span(event.stream if event.stream != COMPUTE else event.axis, f"{event.kind} {event.value}", start, end, "communication",
                       {"bytes": event.nbytes, "axis": event.axis, "module": event.module, "source": event.source, "window": event.window,
                        "ready": MICROSECONDS * then})
            continue
        if isinstance(event, Stretch):
            yield from _works(event, now, then)
        elif isinstance(event, Wait) and then > now:
            call = played.program.events[event.call]
            assert isinstance(call, Call), "a wait is for a call"
            yield Span(COMPUTE, f"wait for {call.kind} {call.value}", now, then, "idle", {"axis": call.axis, "module": call.module})
        elif isinstance(event, Host) and then > now:
            yield Span(COMPUTE, "wait for the host", now, then, "idle")
        now = then


def _works(event: Stretch, begin: float, end: float) -> Iterator[Span]:
    """The works of a stretch, which share what it lasts longer than alone."""
    scale, at = (end - begin) / event.seconds if event.seconds else 0.0, begin
    for i, work in enumerate(event.works):
        until = end if i == len(event.works) - 1 else at + scale * work.seconds
        yield Span(COMPUTE, work.name if work.kind == "op" else f"{work.kind} {work.name}", at, until, work.kind,
                   {"module": work.module, "source": work.source, "window": work.window})
        at = until


def trace_events(tracks: Sequence[Track], memory: Iterable[tuple[float, Mapping[str, int]]] = (),
                 traffic: Iterable[LinkTime] = ()) -> Iterator[dict[str, Any]]:
    """The events of a trace, in Chrome's format: times in microseconds. `memory`: (seconds, bytes by category), `traffic`: of the links, both of
    the first track."""
    for track in tracks:
        streams = [COMPUTE, *sorted({s.stream for s in track.spans} - {COMPUTE})]
        pid = track.process
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": track.title}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": 2 * track.rank + track.measured}}
        for tid, stream in enumerate(streams):
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": stream}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
        for span in track.spans:
            yield {"ph": "X", "name": span.name, "cat": span.category, "pid": pid, "tid": streams.index(span.stream),
                   "ts": MICROSECONDS * span.begin, "dur": MICROSECONDS * (span.end - span.begin),
                   "args": {k: v for k, v in span.details.items() if v != ""}}
    for seconds, live in memory:
        yield {"ph": "C", "name": "memory", "pid": tracks[0].process, "ts": MICROSECONDS * seconds, "args": dict(live)}
    for link in traffic:
        for part, nbytes in enumerate((*link.nbytes, 0.0)):
            yield {"ph": "C", "name": f"{link.link}, bytes/s", "pid": tracks[0].process, "ts": MICROSECONDS * part * link.part_s,
                   "args": {"sent": nbytes / link.part_s}}


def write_trace(path: str | os.PathLike[str], events: Iterable[Mapping[str, Any]]) -> None:
    """As one JSON file; compressed where the name ends in .gz. Raises UsageError where it cannot be written or would be too large to open."""
    text = '{"displayTimeUnit": "ms", "traceEvents": [\n' + ",\n".join(json.dumps(e, separators=(",", ":")) for e in events) + "\n]}\n"
    if len(text) > MOST_BYTES:
        raise UsageError(f"the trace would have {len(text) >> 20} MiB, more than viewers open; show fewer ranks with --rank")
    if str(path).endswith(".gz"):
        try:
            Path(path).write_bytes(gzip.compress(text.encode(), mtime=0))
        except OSError as e:
            raise UsageError(f"cannot write {path}: {e.strerror or e}; choose another file") from None
    else:
        write_atomically(path, text)
