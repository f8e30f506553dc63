"""What a simulation found, as data."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from autoshard.base.plan import CATEGORIES, Moment, Plan
from autoshard.simulation.conditions import Conditions
from autoshard.simulation.critical_path import Share
from autoshard.simulation.program import Call, Stretch
from autoshard.simulation.replay import Cause, Replay
from autoshard.simulation.trace import Track, trace_events, write_trace
from autoshard.simulation.traffic import LinkTime, LinkUse, Size


@dataclass(frozen=True)
class Idle:
    """Seconds of a step in which ranks do no work. `why`: "stragglers" (another rank of the group is late), "queued" (an earlier collective
    of the stream runs), "exposed" (the collective itself runs), "finished" (the step of another rank is not over), "host" (it has not
    issued the next op), and in pipelines
    "pipeline" (waiting for other stages). `mean_s`: of all ranks; `most_s`: of the one that has most."""

    why: str
    kind: str
    axis: str
    mean_s: float
    most_s: float


@dataclass(frozen=True)
class Stamp:
    """Live bytes of one rank `seconds` after the step began, by category; `of`: the op, or the value that is moved."""

    seconds: float
    window: str
    of: str
    total: int
    live: Mapping[str, int]


@dataclass(frozen=True, eq=False)
class Simulation:
    """step_s      seconds from the start of the step to the end of the last rank
    objective_s  what the plan says
    work_s       mean over ranks of the seconds of ops, copies and the update; slowed_s of it is lost to collectives that run beside
    slowest      the rank that ends last, fastest_s: when the first one ends
    idle         by cause, the largest first; work_s and all mean_s add up to step_s
    critical     the critical path by what and module, the longest first; adds up to step_s. Empty for pipelines
    links, sizes what a rank sends, by level of links, and by size of the transfers. In pipelines, the first rank
    traffic      what the first rank sends by level of links over time
    memory       over time, of the first rank (in pipelines: of the first stage, empty)
    mfu, hfu     model and hardware FLOP utilisation
    stages       of a pipeline, a row per stage
    make_tracks  `tracks`, made when they are asked for"""

    plan: Plan
    conditions: Conditions
    executed: bool
    step_s: float
    work_s: float
    slowed_s: float
    slowest: int
    fastest_s: float
    idle: tuple[Idle, ...]
    critical: tuple[Share, ...]
    links: tuple[LinkUse, ...]
    sizes: tuple[Size, ...]
    memory: tuple[Stamp, ...]
    mfu: float
    hfu: float
    make_tracks: Callable[[], tuple[Track, ...]] = field(repr=False)
    stages: tuple[Mapping[str, Any], ...] = ()
    traffic: tuple[LinkTime, ...] = ()

    @cached_property
    def tracks(self) -> tuple[Track, ...]:
        """What ranks did when, for a trace."""
        return self.make_tracks()

    @property
    def objective_s(self) -> float:
        return self.plan.objective_s

    def write_trace(self, path: str | os.PathLike[str], beside: Sequence[Track] = ()) -> None:
        """As Chrome and Perfetto read it, see trace.py. `beside`: tracks of a measured step, `autoshard.clocked(model)` has them. Raises UsageError
        where the file cannot be written."""
        own = [replace(t, title=f"{t.title}, simulated") for t in self.tracks] if beside else self.tracks
        write_trace(path, trace_events([*own, *beside], [(stamp.seconds, stamp.live) for stamp in self.memory], self.traffic))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, `step_s` and the rest at the top."""
        same = {name: getattr(self, name) for name in ("step_s", "objective_s", "work_s", "slowed_s", "slowest", "fastest_s", "mfu", "hfu")}
        rows = {name: [asdict(row) for row in getattr(self, name)] for name in ("idle", "critical", "links", "traffic", "sizes", "memory")}
        return {**same, **rows, "mesh": str(self.plan.mesh), "cluster": self.plan.cluster["name"], "model": dict(self.plan.model),
                "program": "executed" if self.executed else "planned", "conditions": list(self.conditions.describe()),
                "stages": [dict(row) for row in self.stages]}


def idle_rows(idle: Mapping[Cause, np.ndarray]) -> tuple[Idle, ...]:
    rows = [Idle(*cause, float(seconds.mean()), float(seconds.max())) for cause, seconds in idle.items()]
    return tuple(sorted(rows, key=lambda row: (-row.mean_s, row.why, row.kind, row.axis)))


def stamped(moments: Iterable[Moment], played: Replay, rank: int = 0) -> tuple[Stamp, ...]:
    """The timeline of a plan on the clock of a rank: a moment is when the op or the move that it names begins, first micro-batch."""
    begins, out, now = _begins(played, rank), [], 0.0
    for moment in moments:
        now = max(now, begins.get((moment.window, moment.op), now))
        out.append(Stamp(now, moment.window, moment.op, moment.total, dict(zip(CATEGORIES, moment.live, strict=True))))
    return tuple(out)


def _begins(played: Replay, rank: int) -> dict[tuple[str, str], float]:
    """When each op and each redistribution of a rank begins for the first time."""
    out: dict[tuple[str, str], float] = {}
    now = 0.0
    for event, clock in zip(played.program.events, played.clock, strict=True):
        then = float(clock.flat[rank])
        if isinstance(event, Call):
            out.setdefault((event.window, event.value), now)
            continue
        if isinstance(event, Stretch):
            scale, at = (then - now) / event.seconds if event.seconds else 0.0, now
            for work in event.works:
                out.setdefault((work.window, "optimizer" if work.kind == "update" else work.name), at)
                at += scale * work.seconds
        now = then
    return out

