"""What one rank does in a step, as a list of events: all ranks have the same list.

It is made of the schedule that is lowered and run. Ops are work on the compute stream. A redistribution issues its collectives: all but the
last are waited for at once, the last one runs on the stream of its mesh axes until the schedule waits for it. Copies that rearrange buffers
are work: of what is sent before the call, of what is received after the wait.

Two questions can be asked. "planned": every gradient is reduced by itself, small ones in the time of their share of a call, as the objective
prices it; "executed": small gradients share calls (lower/buckets.py), as it runs, and what Python takes besides is counted where the device is its
own host (`OwnHost`).
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from autoshard.base.graph import Graph
from autoshard.base.mesh import Mesh
from autoshard.base.plan import Plan, in_flight
from autoshard.base.windows import END, START
from autoshard.collectives.phases import Phases, alone, phases, scaled
from autoshard.cost.cluster import Cluster
from autoshard.cost.compute import host_seconds, optimizer_seconds
from autoshard.cost.memory import value_bytes
from autoshard.cost.redistribute import SLICE, Step
from autoshard.cost.shared_calls import small_gradients
from autoshard.errors import UsageError
from autoshard.lower.schedule import CollectiveCall, Instruction, Schedule, parameter_gradients
from autoshard.lower.seconds import Prices, priced, uneven_axes

UPDATE = "update"
"""The window of the optimizer's update."""


@dataclass(frozen=True)
class Work:
    """Something on the compute stream: an op, a copy that rearranges a buffer ("copy"), the optimizer's update ("update"), or the rest of a
    step ("rest"). `name`: of the op, or the value that is copied, or the parameter; `seconds` with no collective beside it; `uneven`: mesh
    axes along which the data decides what a rank does (experts), whose busiest rank takes `seconds` at the profile's `imbalance`."""

    kind: str
    name: str
    seconds: float
    window: str
    module: str = ""
    source: str = ""
    uneven: tuple[int, ...] = ()


@dataclass(frozen=True)
class Stretch:
    """Work without communication in between."""

    works: tuple[Work, ...]
    seconds: float


@dataclass(frozen=True)
class Call:
    """A collective is issued. `axis`: as plans write it, `axes`: indices of its mesh axes; `seconds`: alone; `stream`: calls of one stream run
    one after the other; `value`: what is moved, or the op that it is inside of; `uneven`: as of `Work`."""

    kind: str
    axis: str
    axes: tuple[int, ...]
    nbytes: int
    seconds: float
    phases: Phases = field(repr=False)
    stream: str
    window: str
    value: str
    module: str = ""
    source: str = ""
    uneven: tuple[int, ...] = ()


@dataclass(frozen=True)
class Wait:
    """The compute stream stops until the call at position `call` of the events is through."""

    call: int


@dataclass(frozen=True)
class Host:
    """The compute stream stops until the host has come to what follows, `seconds` after the step began."""

    seconds: float


Event = Stretch | Call | Wait | Host


@dataclass(frozen=True)
class Program:
    """`interference`: share of a running collective's time that work beside it loses."""

    events: tuple[Event, ...]
    mesh: Mesh
    interference: float = 0.0

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(e for e in self.events if isinstance(e, Call))

    @property
    def works(self) -> tuple[Work, ...]:
        return tuple(w for e in self.events if isinstance(e, Stretch) for w in e.works)


def program_of(graph: Graph, plan: Plan, order: Schedule, cluster: Cluster, *, executed: bool = False,
               windows: Sequence[str] | None = None) -> Program:
    """The program of `plan`, whose ranks do `order`. `graph`: with what backward recomputes. `windows`: those to run, in order; default: a
    whole step, micro-batch by micro-batch, and the optimizer's update."""
    maker = _Maker(graph, plan, cluster, executed)
    order = priced(order, graph, plan, cluster)
    names = [w.name for w in order.windows]
    made: dict[str, tuple[_Event, ...]] = {w.name: tuple(maker.window(w.name, w.instructions)) for w in order.windows}
    for name in windows or _step(names, graph.microbatches):
        maker.put(made[name])
    if windows is None:
        maker.put((*_updates(graph, plan, cluster), *(_rest(graph, cluster) if executed else ())))
    program = Program(maker.finished(), plan.spec_mesh, cluster.overlap.interference if maker.overlaps else 0.0)
    return host_bound(program, cluster.device.launch) if cluster.device.launch else program


def check_loads(works: Iterable[Work]) -> None:
    """Raises UsageError where no work depends on how many rows come to a rank."""
    if not any(w.uneven for w in works):
        raise UsageError("expert_load: this plan splits no experts over ranks, so that no rank's work depends on which experts are chosen")


def host_bound(program: Program, launch: float) -> Program:
    """The program on a device whose host issues one op or collective per `launch` seconds, ahead of it and on its own clock, which nothing
    in the step stops. The optimizer's update is issued in one piece."""
    events: list[Event] = []
    moved: dict[int, int] = {}
    issued = 0
    for at, event in enumerate(program.events):
        if isinstance(event, Wait):
            events.append(Wait(moved[event.call]))
            continue
        for piece in _issued(event):
            issued += 1
            events += [Host(issued * launch), piece]
        moved[at] = len(events) - 1
    return replace(program, events=tuple(events))


def _issued(event: Event) -> Sequence[Event]:
    """What the host issues one by one of an event."""
    if isinstance(event, Stretch) and any(w.window != UPDATE for w in event.works):
        return [Stretch((w,), w.seconds) for w in event.works]
    return [event]


def update_program(graph: Graph, plan: Plan, cluster: Cluster) -> Program:
    """The optimizer's update alone."""
    works = tuple(_updates(graph, plan, cluster))
    return Program((Stretch(works, sum(w.seconds for w in works)),) if works else (), plan.spec_mesh)


def _updates(graph: Graph, plan: Plan, cluster: Cluster) -> Iterator[Work]:
    """The update of every parameter that has a gradient, as it is stored."""
    optimizer = plan.settings.get("optimizer", "none")
    for op in parameter_gradients(graph):
        name, nbytes = str(op.target.name), value_bytes(graph.meta(op.refs[0]), plan.ops[op.name].inputs[0], plan.spec_mesh)
        seconds = (host_seconds if name in plan.offload else optimizer_seconds)(optimizer, nbytes, cluster.device)
        if seconds:
            yield Work("update", name, float(seconds), UPDATE, name.rpartition(".")[0])


def _rest(graph: Graph, cluster: Cluster) -> Iterator[Work]:
    """What a training step takes in Python besides."""
    host, parameters = cluster.device.own_host, sum(1 for _ in parameter_gradients(graph))
    if host is not None and parameters:
        yield Work("rest", "", host.step + parameters * host.parameter, UPDATE)


def _step(names: Sequence[str], microbatches: int) -> list[str]:
    """The windows of a step in the order they run."""
    each = [n for n in names if n not in (START, END)]
    return [*(n for n in names if n == START), *each * microbatches, *(n for n in names if n == END)]


@dataclass(frozen=True)
class _Issue:
    """A call of a window, and a number for its wait."""

    call: Call
    number: int


@dataclass(frozen=True)
class _WaitFor:
    number: int


_Event = Work | _Issue | _WaitFor


class _Maker:
    """Turns instructions into events, and puts those of windows one after the other."""

    def __init__(self, graph: Graph, plan: Plan, cluster: Cluster, executed: bool) -> None:
        self.graph, self.plan, self.executed = graph, plan, executed
        self.mesh = mesh = plan.spec_mesh
        self.imbalance = cluster.device.imbalance
        self.view = cluster.device.own_host.view if executed and cluster.device.own_host else None
        self.prices = Prices(mesh, cluster, small_gradients(graph, in_flight(plan.settings)))
        self.overlaps = cluster.overlap.eta > 0
        self._phases = lru_cache(maxsize=None)(
            lambda kind, axis, nbytes: phases(kind, nbytes, cluster.link_of(mesh, mesh.axes(axis))))
        self._events: list[Event] = []
        self._pending: list[Work] = []
        self._numbers = 0

    # --- events of a window ---

    def window(self, name: str, instructions: Sequence[Instruction]) -> Iterator[_Event]:
        later: dict[int, tuple[_Event, ...]] = {}  # per redistribution: what its wait does
        for at, i in enumerate(instructions):
            if i.kind == "compute":
                yield from self._compute(name, i)
            elif i.kind == "redistribute":
                *begun, last = self._redistribute(name, i)
                yield from begun
                later[at] = last
            else:
                for dep in i.deps:
                    yield from later.pop(dep, ())

    def _compute(self, window: str, i: Instruction) -> Iterator[_Event]:
        op = self.graph.op(i.op)
        uneven = uneven_axes(self.graph.calls[i.op], self.plan.ops[i.op], self.mesh)
        if seconds := i.seconds or self.view:
            yield Work("op", i.op, seconds, window, op.module, op.source, uneven)
        for call in i.calls:
            yield from self._at_once(self._issue(window, call, i.op, op.module, op.source, uneven))

    def _redistribute(self, window: str, i: Instruction) -> Iterator[Any]:
        """Events of a redistribution; the last item is the tuple of those of its wait."""
        where = [self._where(i, k) for k in range(len(i.reads))]
        last: list[tuple[Step, tuple[str, str, str]]] = []
        for steps, shown in zip(i.steps, where, strict=True):
            sent = [s for s in steps if s.kind != SLICE and s.nbytes]
            for step in sent[:-1]:
                yield from self._copies(window, step, shown, before=True)
                yield from self._at_once(self._issue(window, self._call(step), *shown, factor=self._share(i, step)))
                yield from self._copies(window, step, shown, before=False)
            last += [(s, shown) for s in sent[-1:]]
        for step, shown in last:
            yield from self._copies(window, step, shown, before=True)
        issued = list(self._last_calls(window, i, last))
        for event in issued:
            yield event
            if isinstance(event, _Issue) and not self.overlaps:
                yield _WaitFor(event.number)
        after = [w for step, shown in last for w in self._copies(window, step, shown, before=False)]
        yield (*(_WaitFor(e.number) for e in issued if isinstance(e, _Issue) and self.overlaps), *after)

    def _last_calls(self, window: str, i: Instruction, last: Sequence[tuple[Step, tuple[str, str, str]]]) -> Iterator[_Event]:
        shared = i.calls[-1] if i.calls and i.calls[-1].bucket else None
        if shared is None or not self.executed:
            for step, shown in last:
                yield self._issue(window, self._call(step), *shown, factor=self._share(i, step))
            return
        value, module, source = last[0][1]
        yield Work("copy", value, self.prices.of_copy(shared.nbytes), window, module, source)
        yield self._issue(window, shared, value, module, source)

    def _where(self, i: Instruction, k: int) -> tuple[str, str, str]:
        """Name, module and source line of a value that is redistributed."""
        op = self.graph.op(i.writes[k].ref.op)
        return str(i.writes[k]), op.module or (str(op.target) if op.kind == "param" else ""), op.source

    def _call(self, step: Step) -> CollectiveCall:
        return CollectiveCall(step.kind, self.mesh.label(step.axes), step.nbytes)

    def _copies(self, window: str, step: Step, shown: tuple[str, str, str], before: bool) -> Iterator[_Event]:
        """Scatters rearrange what they send, gathers what they receive; all_to_alls may do both, and all of it is put behind."""
        if step.rearranged and before == (step.kind == "reduce_scatter"):
            value, module, source = shown
            yield Work("copy", value, self.prices.of_copy(step.rearranged), window, module, source)

    def _share(self, i: Instruction, step: Step) -> float:
        """Of a call of its own, what a step of a redistribution takes: less for small gradients as planned."""
        own = self.prices.of_call(self._call(step))
        return 1.0 if self.executed or not own else self.prices.planned(self._call(step), i) / own

    def _issue(self, window: str, call: CollectiveCall, value: str, module: str, source: str, uneven: tuple[int, ...] = (),
               factor: float = 1.0) -> _Issue:
        groups = scaled(self._phases(call.kind, call.axis, call.nbytes), self.imbalance if uneven else factor)
        self._numbers += 1
        return _Issue(Call(call.kind, call.axis, self.mesh.axes(call.axis), call.nbytes, alone(groups), groups,
                           call.axis if self.overlaps else "compute", window, value, module, source, uneven), self._numbers)

    def _at_once(self, issue: _Issue) -> Iterator[_Event]:
        yield issue
        yield _WaitFor(issue.number)

    # --- the step ---

    def put(self, events: Sequence[_Event]) -> None:
        at: dict[int, int] = {}
        for event in events:
            if isinstance(event, Work):
                self._pending.append(event)
                continue
            self._flush()
            if isinstance(event, _Issue):
                at[event.number] = len(self._events)
                self._events.append(event.call)
            else:
                self._events.append(Wait(at[event.number]))

    def _flush(self) -> None:
        if self._pending:
            self._events.append(Stretch(tuple(self._pending), sum(w.seconds for w in self._pending)))
            self._pending = []

    def finished(self) -> tuple[Event, ...]:
        self._flush()
        return tuple(self._events)
