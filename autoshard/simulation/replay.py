"""Plays a program on all ranks at once: clocks are arrays of the shape of the mesh.

Every rank has a clock of its compute stream and one per stream of collectives. Events are walked in program order, which all ranks share:

    stretch   the clock advances by its seconds. While a collective of the rank runs, work loses the share `interference` of its speed:
              work of C seconds behind which a collective of H hides takes C + k H, as the objective prices it
    call      a rank is ready when it has come to the call and its stream is free. The collective starts when the last rank of its group is
              ready, and ends on all of them after its seconds
    wait      the clock is at least the end of the call
    host      the clock is at least the host's, which issues ops one by one

Nothing is shared between streams: two collectives that run at once on one link both have all of it (events.py has them share).
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from autoshard.cost.cluster import Cluster
from autoshard.simulation.conditions import Conditions, Jitter, seconds_of
from autoshard.simulation.program import Call, Host, Program, Stretch, Wait

STRAGGLERS, QUEUED, EXPOSED, FINISHED, HOST = "stragglers", "queued", "exposed", "finished", "host"
"""Why a rank is idle: another rank of the group is late; an earlier call of the stream runs; the collective itself runs; its step is over
and that of another rank is not; the host has not issued the next op."""
Cause = tuple[str, str, str]
"""(why, kind of collective, axis)."""


@dataclass(frozen=True, eq=False)
class Running:
    """A collective: when its groups start and end, as arrays that broadcast to the mesh."""

    start: np.ndarray
    end: np.ndarray


@dataclass(frozen=True, eq=False)
class Replay:
    """clock   per event an array over ranks: after a stretch or a wait, the time; of a call, when the rank is ready for it
    calls      per call, by its position among the events
    worked     seconds of work per rank, with what its stretches lost to collectives beside them (`slowed`)
    idle       seconds per rank by cause; with `worked` they add up to `step_s` on every rank
    finish     when each rank has done all its work
    alike      a number per rank: ranks that did the same at the same times have the same one"""

    program: Program
    clock: tuple[np.ndarray, ...]
    calls: dict[int, Running]
    worked: np.ndarray
    slowed: np.ndarray
    idle: dict[Cause, np.ndarray]
    finish: np.ndarray
    alike: np.ndarray

    @property
    def step_s(self) -> float:
        return float(self.finish.max())


def replay(program: Program, cluster: Cluster, conditions: Conditions | None = None, own: Mapping[int, np.ndarray] | None = None) -> Replay:
    """The step of `program`. `own`: by position among the events, seconds of a stretch on each rank (of the mesh's shape) in the place of the
    program's. Raises UsageError for conditions about ranks, links and nodes that are not there."""
    conditions = conditions or Conditions()
    conditions.check(program.mesh, cluster)
    return walk(Player(program, cluster, conditions), own)


def walk(player: "Player", own: Mapping[int, np.ndarray] | None = None) -> Replay:
    """Every event of its program, in order. `own`: as `replay` takes it."""
    for at, event in enumerate(player.program.events):
        if isinstance(event, Stretch):
            player.stretch(player.alone(event) if own is None else own.get(at, event.seconds))
        elif isinstance(event, Call):
            player.call(at, event)
        elif isinstance(event, Host):
            player.host(event)
        else:
            player.wait(event)
    return player.finished()


class Player:
    """The clocks of all ranks. `advanced` and `running` say when work and collectives end."""

    def __init__(self, program: Program, cluster: Cluster, conditions: Conditions) -> None:
        mesh = program.mesh
        self.program, self.sizes = program, mesh.sizes
        self.work, self.jitter, self.links = conditions.work(mesh), Jitter(conditions, mesh), conditions.links(mesh, cluster)
        self.load = cache(lambda axes: conditions.load(mesh, axes) / cluster.device.imbalance)
        self.loaded = bool(conditions.expert_load)
        self.now = np.zeros(self.sizes)
        self.free: dict[str, np.ndarray] = {}
        self.calls: dict[int, Running] = {}
        self.busy: list[Running] = []
        self.clock: list[np.ndarray] = []
        self.worked, self.slowed = np.zeros(self.sizes), np.zeros(self.sizes)
        self.idle: dict[Cause, np.ndarray] = {}
        self.alike = np.zeros(self.sizes)
        self.weights = np.random.default_rng(0)

    def alone(self, event: Stretch) -> np.ndarray | float:
        """Seconds of a stretch on each rank, with the loads of its experts."""
        if not self.loaded:
            return event.seconds
        return sum((w.seconds * (self.load(w.uneven) - 1.0) for w in event.works if w.uneven), start=np.asarray(event.seconds))

    def busiest(self, event: Call) -> np.ndarray | float:
        """How many times as long a call takes because of the rank of its group that sends most."""
        return self.load(event.uneven).max(axis=event.axes, keepdims=True) if self.loaded and event.uneven else 1.0

    def stretch(self, alone: np.ndarray | float) -> None:
        seconds = alone * self.work * self.jitter()
        end = self.advanced(seconds)
        spent = end - self.now
        self.worked += spent
        self.slowed += spent - seconds
        self._at(end)

    def advanced(self, seconds: np.ndarray | float) -> np.ndarray:
        if self.program.interference:
            first = self.now.min()
            self.busy = [r for r in self.busy if r.end.max() > first]
            return advance(self.now, seconds, self.busy, self.program.interference)
        return self.now + seconds

    def running(self, at: int, event: Call) -> tuple[np.ndarray, Running]:
        """When each rank is ready for a call, and when it runs."""
        ready = np.maximum(self.now, self.free[event.stream]) if event.stream in self.free else self.now
        start = ready.max(axis=event.axes, keepdims=True)
        running = Running(start, start + seconds_of(event.phases, event.seconds, event.axes, self.links) * self.busiest(event))
        self.free[event.stream] = np.broadcast_to(running.end, self.sizes)
        return ready, running

    def call(self, at: int, event: Call) -> None:
        ready, running = self.running(at, event)
        self.calls[at] = running
        if self.program.interference:
            self.busy.append(running)
        self.clock.append(ready)

    def wait(self, event: Wait) -> None:
        call, running, ready = self.program.events[event.call], self.calls[event.call], self.clock[event.call]
        assert isinstance(call, Call), "a wait is for a call"
        until = np.maximum(self.now, running.end)
        for why, begin, end in ((QUEUED, self.now, np.minimum(ready, until)), (STRAGGLERS, np.maximum(self.now, ready), running.start),
                                (EXPOSED, np.maximum(self.now, running.start), until)):
            if (end > begin).any():
                key = (why, call.kind, call.axis)
                self.idle[key] = self.idle.get(key, 0.0) + np.maximum(end - begin, 0.0)
        self._at(until)

    def host(self, event: Host) -> None:
        until = np.maximum(self.now, event.seconds)
        if (until > self.now).any():
            self.idle[HOST, "", ""] = self.idle.get((HOST, "", ""), 0.0) + (until - self.now)
        self._at(until)

    def _at(self, time: np.ndarray) -> None:
        self.now = time
        self.clock.append(time)
        self.alike += self.weights.random() * time

    def finished(self) -> Replay:
        early = self.now.max() - self.now
        if early.any():
            self.idle[FINISHED, "", ""] = early
        return Replay(self.program, tuple(self.clock), self.calls, self.worked, self.slowed, self.idle, self.now, self.alike)


def advance(now: np.ndarray, seconds: np.ndarray | float, busy: list[Running], k: float) -> np.ndarray:
    """When work of `seconds` that begins at `now` ends, at speed 1 - k while any collective of the rank runs."""
    left = np.broadcast_to(np.asarray(seconds, float), now.shape).copy()
    beside = [r for r in busy if (r.end > now).any()]
    while beside:
        running, change = np.zeros(now.shape, bool), np.full(now.shape, np.inf)
        for r in beside:
            on = (r.start <= now) & (now < r.end)
            running |= on
            change = np.minimum(change, np.where(on, r.end, np.where(r.start > now, r.start, np.inf)))
        speed = np.where(running, max(1.0 - k, 1e-12), 1.0)  # k = 1: work stands still
        most = (change - now) * speed
        ends = left <= most
        now = np.where(ends, now + left / speed, change)
        left = np.where(ends, 0.0, left - np.where(ends, 0.0, most))
        if not left.any():
            return now
        beside = [r for r in beside if (r.end > now).any()]
    return now + left
