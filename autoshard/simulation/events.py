"""Plays a program event by event on classes of ranks, whose collectives share the links that they use at the same time.

What a rank does, when a collective starts and what it slows are as in replay.py. What differs: collectives of different streams that are on one link
share it. A rank has a port on every level of links. The bytes of a phase go through the ports of all ranks of its group at one speed, as a share of
what the phase reaches alone; the shares of all that use a port add up to what the port has (1, or less on a slow link). They are max-min fair: no
share can grow without another one, which is no larger, becoming smaller. Latencies and overheads take no share. Shares change whenever a phase
starts or ends.

Where nothing is shared this gives what replay gives (tests/simulation/test_events.py).
"""
from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

import numpy as np

from autoshard.collectives.phases import Phase, scaled
from autoshard.cost.cluster import Cluster
from autoshard.errors import UsageError
from autoshard.simulation.classes import Classes, classes_of
from autoshard.simulation.conditions import Conditions
from autoshard.simulation.program import Call, Host, Program, Stretch, Wait
from autoshard.simulation.replay import Player, Replay, Running, replay, walk

Port = tuple[int, str]
"""Of a class, on a level of links."""
Name = tuple[int, int]
"""A collective: the position of its call, and the kind of group."""
MOST_CLASSES = 1024
ROUNDING = 1e-12
"""Relative: what is left of something that is done."""


@dataclass(eq=False)
class Flow:
    """A phase under way: seconds of its latency left, then seconds that its bytes would take alone; `share` of that speed."""

    ports: tuple[Port, ...]
    fixed: float
    moving: float
    share: float = 0.0

    @property
    def left(self) -> float:
        """Seconds until something changes."""
        return self.fixed if self.fixed else self.moving / self.share

    @staticmethod
    def of(phase: Phase, members: Iterable[int]) -> "Flow":
        return Flow(tuple((c, phase.link) for c in members), phase.fixed, phase.wire / phase.rate)


@dataclass(eq=False)
class Collective:
    """One group's: its classes, those that have come, and, once it runs, what of its phases is left."""

    call: Call
    members: tuple[int, ...]
    ready: set[int] = field(default_factory=set)
    groups: deque[tuple[Phase, ...]] = field(default_factory=deque)
    flows: list[Flow] = field(default_factory=list)
    start: float = inf
    end: float = inf


def play_events(program: Program, cluster: Cluster, conditions: Conditions | None = None) -> Replay:
    """The step of `program` on links that its collectives share, see above. Raises UsageError for conditions about ranks, links and nodes that
    are not there, and where too many ranks differ for an engine that takes them one by one."""
    conditions = conditions or Conditions()
    conditions.check(program.mesh, cluster)
    told = _Told(program, cluster, conditions)
    walk(told)  # what each stretch takes on each rank, in the order that jitter is drawn
    own = [*told.seconds.values()] if conditions.jitter or told.loaded else [np.asarray(told.work)]
    busiest = {at: told.busiest(e) for at, e in enumerate(program.events) if told.loaded and isinstance(e, Call) and e.uneven}
    classes = classes_of([*own, *told.links.values(), *map(np.asarray, busiest.values())], (e.axes for e in program.calls), program.mesh.sizes)
    if classes.count > MOST_CLASSES:
        raise UsageError(f"{classes.count} of the {program.mesh.size} ranks differ; shared links are played for up to {MOST_CLASSES} ranks or "
                         "classes of equal ones: leave out the jitter and varied speeds, or simulate without shared links")
    seconds = {at: classes.of_first(s) for at, s in told.seconds.items()}
    limits = {(c, link): share for link, shares in told.links.items() for c, share in enumerate(classes.of_first(shares))}
    run = _Run(program, classes, seconds, limits, {at: classes.of_first(np.asarray(x)) for at, x in busiest.items()})
    run.play()
    return walk(_Told(program, cluster, conditions, run))


def play(program: Program, cluster: Cluster, conditions: Conditions) -> Replay:
    """By the engine that the conditions ask for. Raises what it raises."""
    return (play_events if conditions.shared_links else replay)(program, cluster, conditions)


class _Run:
    """`clock[at][class]`: as `Replay.clock`, once the class is past event `at`. `busiest[at][class]`: how many times as long a call takes."""

    def __init__(self, program: Program, classes: Classes, seconds: Mapping[int, list[float]], limits: Mapping[Port, float],
                 busiest: Mapping[int, list[float]]) -> None:
        self.program, self.classes, self.seconds, self.limits, self.busiest = program, classes, seconds, limits, busiest
        self.now, n = 0.0, classes.count
        self.clock = [[0.0] * n for _ in program.events]
        self.collectives: dict[Name, Collective] = {}
        self.at, self.left, self.until = [0] * n, [0.0] * n, [0.0] * n
        self.queues: dict[tuple[int, str], deque[Name]] = defaultdict(deque)
        self.running: dict[Name, Collective] = {}
        self.beside = [0] * n

    def play(self) -> None:
        todo, last = set(range(self.classes.count)), len(self.program.events)
        while True:
            for c in todo:
                self._go_on(c)
            if not self.running and all(at == last for at in self.at):
                return
            self._share()
            todo = self._pass(self._next())

    # --- without time passing ---

    def _go_on(self, c: int) -> None:
        """A class does what takes no time, up to work, or a wait for what is not through."""
        events = self.program.events
        while self.at[c] < len(events) and not self.left[c] and self.until[c] <= self.now:
            at = self.at[c]
            event = events[at]
            if isinstance(event, Stretch):
                self.left[c] = self.seconds[at][c]
                if self.left[c]:
                    return
            elif isinstance(event, Host) and event.seconds > self.now:
                self.until[c] = event.seconds
                return
            elif isinstance(event, Call):
                self._issue(c, at, event)
            elif isinstance(event, Wait) and self._of(c, event.call).end > self.now:
                return
            self._past(c)

    def _past(self, c: int) -> None:
        if not isinstance(self.program.events[self.at[c]], Call):
            self.clock[self.at[c]][c] = self.now
        self.at[c] += 1

    def _of(self, c: int, at: int) -> Collective:
        call = self.program.events[at]
        assert isinstance(call, Call), "a wait is for a call"
        return self.collectives[at, self.classes.groups[call.axes][c]]

    def _issue(self, c: int, at: int, call: Call) -> None:
        name = at, self.classes.groups[call.axes][c]
        if name not in self.collectives:
            groups = scaled(call.phases, self.busiest[at][c]) if at in self.busiest else call.phases
            self.collectives[name] = Collective(call, self.classes.members[call.axes][name[1]], groups=deque(groups))
        queue = self.queues[c, call.stream]
        queue.append(name)
        if len(queue) == 1:
            self._come(c, name)

    def _come(self, c: int, name: Name) -> None:
        """A class is ready for a collective: it has issued it, and its stream is free."""
        collective = self.collectives[name]
        collective.ready.add(c)
        self.clock[name[0]][c] = self.now
        if len(collective.ready) == len(collective.members):
            collective.start = self.now
            self.running[name] = collective
            for member in collective.members:
                self.beside[member] += 1

    # --- links ---

    def _share(self) -> None:
        """Fill the ports evenly, until one is full; what uses it is settled; go on with the others."""
        moving = [f for collective in self.running.values() for f in collective.flows if not f.fixed and f.moving]
        users: dict[Port, set[Flow]] = defaultdict(set)
        for f in moving:
            for port in f.ports:
                users[port].add(f)
        room = {port: self.limits.get(port, 1.0) for port in users}
        while any(users.values()):
            share, tight = min((room[port] / len(flows), port) for port, flows in users.items() if flows)
            for f in [*users[tight]]:
                f.share = share
                for port in f.ports:
                    users[port].discard(f)
                    room[port] -= share

    # --- time ---

    def _speed(self, c: int) -> float:
        return max(1.0 - self.program.interference, 1e-12) if self.beside[c] else 1.0

    def _next(self) -> float:
        """Seconds until something ends."""
        out = 0.0 if any(not c.flows for c in self.running.values()) else inf
        for collective in self.running.values():
            out = min([out, *(f.left for f in collective.flows)])
        for c, left in enumerate(self.left):
            out = min(out, left / self._speed(c) if left else inf, self.until[c] - self.now if self.until[c] > self.now else inf)
        assert out < inf, "ranks wait for each other: a collective that some of them never issue"
        return out

    def _pass(self, seconds: float) -> set[int]:
        """Let time pass; the classes that may go on."""
        then, free = self.now + seconds, set[int]()
        for c, left in enumerate(self.left):
            if left:
                self.left[c] = _less(left, seconds * self._speed(c))
                if not self.left[c]:
                    free.add(c)
            elif self.until[c] > self.now and self.until[c] <= then * (1 + ROUNDING):
                self.until[c] = then
                free.add(c)
        for collective in self.running.values():
            for f in collective.flows:
                if f.fixed:
                    f.fixed = _less(f.fixed, seconds)
                else:
                    f.moving = _less(f.moving, seconds * f.share)
        self.now = then
        for c in free:
            if self.at[c] < len(self.program.events) and isinstance(self.program.events[self.at[c]], Stretch):
                self._past(c)
        for name, collective in [*self.running.items()]:
            free |= self._go_through(name, collective)
        return free

    def _go_through(self, name: Name, collective: Collective) -> set[int]:
        """On to the next phases where the earlier ones are through; the classes that wait for its end."""
        collective.flows = [f for f in collective.flows if f.fixed or f.moving]
        while not collective.flows and collective.groups:
            flows = (Flow.of(phase, collective.members) for phase in collective.groups.popleft())
            collective.flows = [f for f in flows if f.fixed or f.moving]
        if collective.flows:
            return set()
        collective.end = self.now
        del self.running[name]
        for c in collective.members:
            self.beside[c] -= 1
            queue = self.queues[c, collective.call.stream]
            queue.popleft()
            if queue:
                self._come(c, queue[0])
        return set(collective.members)


def _less(left: float, done: float) -> float:
    rest = left - done
    return rest if rest > ROUNDING * left else 0.0


class _Told(Player):
    """Notes what each stretch takes alone and, with a run that was played, accounts for its times."""

    def __init__(self, program: Program, cluster: Cluster, conditions: Conditions, run: _Run | None = None) -> None:
        super().__init__(program, cluster, conditions)
        self.run, self.seconds, self.position = run, dict[int, np.ndarray](), 0

    def advanced(self, seconds: np.ndarray | float) -> np.ndarray:
        self.seconds[len(self.clock)] = np.asarray(seconds)
        return self.now if self.run is None else self.run.classes.spread(self.run.clock[len(self.clock)])

    def running(self, at: int, event: Call) -> tuple[np.ndarray, Running]:
        if self.run is None:
            return self.now, Running(self.now, self.now)
        run, kinds = self.run, self.run.classes.groups[event.axes]
        found = [run.collectives[at, kinds[c]] for c in range(run.classes.count)]
        start, end = (run.classes.spread([getattr(c, name) for c in found]) for name in ("start", "end"))
        return run.classes.spread(run.clock[at]), Running(start, end)
