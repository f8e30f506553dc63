"""Graph + Plan -> Schedule: what one rank does, in order, in each window of the step (forward and backward in training).

A value is *held* in a spec. Ops make held values, redistributions make further ones, each (value, window,
spec) once however many ops read it. The order is a function of the graph and the plan alone, so all ranks
issue the same collectives in the same order. The schedule is what is executed, and all that a player of it needs: it says
what an instruction waits for, on which stream it runs, which collectives it issues (reductions of small gradients share calls),
and which values nobody reads after it.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from autoshard.base.graph import BACKWARD, Graph, Op, Ref
from autoshard.base.mesh import Mesh
from autoshard.base.plan import LATE_REDUCTION, Plan, Window, in_flight
from autoshard.base.roles import Role
from autoshard.base.spec import Spec, format_spec
from autoshard.base.windows import ONCE
from autoshard.cost.memory import value_bytes
from autoshard.cost.redistribute import SLICE, Step
from autoshard.cost.shared_calls import REDUCTIONS, full_call
from autoshard.errors import PlanError
from autoshard.lower.buckets import Flight, shared_calls
from autoshard.program.flow import gradient_bound, is_passing, param_derived
from autoshard.rules.states import states

Route = Callable[[tuple[int, ...], Any, Spec, Spec], tuple[Step, ...]]
"""(logical shape, dtype, source spec, target spec) -> steps: `cost.redistribute.Redistribution.steps`."""
STORED = ("param", "buffer")
COMPUTE = "compute"
"""The stream of everything but collectives."""
PREFETCH = 2
"""Gathers ahead of its use that a gather is issued."""


@dataclass(frozen=True, order=True)
class Held:
    """A value as it lies on the ranks."""

    ref: Ref
    spec: Spec

    def __str__(self) -> str:
        return f"{self.ref}[{format_spec(self.spec)}]"


@dataclass(frozen=True)
class CollectiveCall:
    """A collective as it is called: bytes by the convention of collectives/__init__.py; `axis`: a mesh axis, or several taken as one
    ("dp+tp"). `bucket`: the bytes of the gradients that share the call, empty for a call that the plan has as it is. `seconds`: of the
    call alone, None where nobody has filled them in (lower/seconds.py)."""

    kind: str
    axis: str
    nbytes: int
    bucket: tuple[int, ...] = ()
    seconds: float | None = field(default=None, compare=False)

    def planned(self) -> tuple["CollectiveCall", ...]:
        """The calls of the plan that this one stands for."""
        return tuple(CollectiveCall(self.kind, self.axis, n) for n in self.bucket) or (self,)


@dataclass(frozen=True)
class Instruction:
    """One step of a window.

    compute        an op: `reads` its inputs, `writes` its outputs, `calls` the collectives inside it, where the plan lists them
    redistribute   starts to bring values into other specs: reads[i] becomes writes[i] by steps[i]. Several are gradients whose
                   last collectives are one call, a bucket. Collectives before the last one are waited for at once
    wait           for the last call of a redistribution: `reads` are the values under way, complete from here on

    deps      positions, in this window, of the instructions that make what it reads
    stream    where its work is: "compute", or of a redistribution the mesh axes of its last collective. Streams run beside
              each other, each in the order of the window; the compute stream stops at a wait until the call is through
    frees     values that no later instruction reads, and that nobody keeps: each value of a window is in one of these lists at most
    nbytes    per rank, of the values it makes
    seconds   of its kernels, without its calls; None where nobody has filled them in (lower/seconds.py), and of a wait
    """

    kind: Literal["compute", "redistribute", "wait"]
    reads: tuple[Held, ...] = ()
    writes: tuple[Held, ...] = ()
    op: str = ""
    steps: tuple[tuple[Step, ...], ...] = ()
    calls: tuple[CollectiveCall, ...] = ()
    hideable: bool = False
    nbytes: int = 0
    deps: tuple[int, ...] = ()
    frees: tuple[Held, ...] = ()
    stream: str = COMPUTE
    seconds: float | None = None


@dataclass(frozen=True)
class WindowSchedule:
    """One window. `takes`: the values of earlier windows that it reads (stored parameters and buffers are not among them), in
    the order of first use; `saves`: what later windows take of those that it makes."""

    name: Window
    instructions: tuple[Instruction, ...]
    takes: tuple[Held, ...] = ()
    saves: tuple[Held, ...] = ()

    @property
    def calls(self) -> tuple[CollectiveCall, ...]:
        """Its collectives in the order they are issued; those inside ops where the plan lists them."""
        return tuple(call for i in self.instructions for call in i.calls)


@dataclass(frozen=True)
class Schedule:
    """The windows in order. `outputs`: per output op, the held value it hands out."""

    windows: tuple[WindowSchedule, ...]
    outputs: Mapping[str, Held]

    @property
    def calls(self) -> tuple[CollectiveCall, ...]:
        return tuple(call for w in self.windows for call in w.calls)


def schedule(graph: Graph, plan: Plan, mesh: Mesh, route: Route, prefetch: int = PREFETCH) -> Schedule:
    """Play `plan`. Hideable gathers are issued `prefetch` gathers ahead of their use; gradient reductions as soon as the
    gradient exists, waited for at the end, where the casts of what they give come too, or, the oldest first, when more bytes are on
    their way than the plan's settings allow, or all at the end where these say so. Small ones share calls (buckets.py).
    Raises PlanError where the plan lacks an op or a copy."""
    missing = [op.name for op in graph.ops if op.name not in plan.ops]
    if missing:
        raise PlanError(f"the plan has no specs for op {missing[0]!r} ({len(missing)} in all); it was made for another graph")
    gradients = frozenset() if reduces_late(plan.settings) else gradient_bound(graph)
    windows = [_Window(_Moves(graph, plan, mesh, route, param_derived(graph), gradients), w.name) for w in graph.windows]
    takes = [tuple(dict.fromkeys(h for h in w.from_earlier() if graph.op(h.ref.op).kind not in STORED or h.spec != made_as(plan, h.ref)))
             for w in windows]
    done = []
    for i, w in enumerate(windows):
        later = tuple(dict.fromkeys(h for taken in takes[i + 1:] for h in taken))
        saves = tuple(h for h in later if h not in takes[i] and w.has(h))
        again = done[0].saves if done and done[0].name in ONCE and w.window not in ONCE else ()  # the next micro-batch reads it too
        done.append(WindowSchedule(w.window, w.instructions(prefetch, frozenset((*later, *again))), takes[i], saves))
    outputs = {op.name: Held(op.refs[0], plan.ops[op.name].inputs[0]) for op in graph.of_kind("output") if op.refs}
    return Schedule(tuple(done), outputs)


def reduces_late(settings: Mapping[str, Any]) -> bool:
    """Whether a plan of these settings reduces gradients when backward is through: in nobody's shadow."""
    return LATE_REDUCTION.items() <= dict(settings).items()


def deferred(graph: Graph, plan: Plan) -> Plan:
    """The plan with parameters' gradients left as backward makes them, Partial where they are: for `no_sync`."""
    ops = dict(plan.ops)
    for op in parameter_gradients(graph):
        ops[op.name] = replace(ops[op.name], inputs=(made_as(plan, op.refs[0]),))
    return replace(plan, ops=ops)


def parameter_gradients(graph: Graph) -> tuple[Op, ...]:
    """The outputs that hand out gradients of parameters (inputs may have some too)."""
    params = {op.target for op in graph.of_kind("param")}
    return tuple(op for name, op in graph.outputs(Role.GRADIENT).items() if name in params and op.refs)


def made_as(plan: Plan, ref: Ref) -> Spec:
    """The spec a value's producer leaves it in."""
    return plan.ops[ref.op].outputs[ref.index]


@dataclass(frozen=True)
class _Moves:
    """Makes the instructions that bring values into other specs. `weights`, `gradients`: values whose moves may overlap compute."""

    graph: Graph
    plan: Plan
    mesh: Mesh
    route: Route
    weights: frozenset[Ref]
    gradients: frozenset[Ref]

    def nbytes(self, held: Held) -> int:
        return value_bytes(self.graph.meta(held.ref), held.spec, self.mesh)

    def flight(self, own: Held, held: Held, at: int, until: int) -> Flight[Instruction]:
        """The move of one value. Its last call may be shared if that reduces a gradient."""
        meta = self.graph.meta(held.ref)
        steps = tuple(self.route(meta.logical_shape, meta.dtype, own.spec, held.spec))
        sent = [s for s in steps if s.kind != SLICE and s.nbytes]
        calls = tuple(CollectiveCall(s.kind, self.mesh.label(s.axes), s.nbytes) for s in sent)
        move = Instruction("redistribute", (own,), (held,), steps=(steps,), calls=calls, nbytes=self.nbytes(held),
                           hideable=own.ref in self.weights or own.ref in self.gradients, stream=calls[-1].axis if calls else COMPUTE)
        if own.ref not in self.gradients or not sent or sent[-1].kind not in REDUCTIONS:
            return Flight(move, at, until)
        return Flight(move, at, until, sent[-1].nbytes, (sent[-1].kind, sent[-1].axes, sent[-1].reduce_op, meta.dtype))


def reductions(graph: Graph, plan: Plan, mesh: Mesh, route: Route) -> WindowSchedule:
    """Parameters' gradients from how backward makes them to how they are stored, all at once: what `deferred` leaves out."""
    pairs = [(Held(op.refs[0], made_as(plan, op.refs[0])), Held(op.refs[0], plan.ops[op.name].inputs[0])) for op in parameter_gradients(graph)]
    moves = _Moves(graph, plan, mesh, route, frozenset(), frozenset(own.ref for own, _ in pairs))
    flights = [moves.flight(own, held, 0, 0) for own, held in dict.fromkeys(pairs) if own != held]
    calls = [_as_one([f.what for f in group]) for group in shared_calls(flights, full_call(in_flight(plan.settings)))]
    keep = frozenset(held for _, held in pairs)
    return WindowSchedule(BACKWARD, _linked([*calls, *map(_wait_for, calls)], keep), tuple(dict.fromkeys(own for own, _ in pairs)))


class _Window:
    """Orders one window. Positions count the window's ops; the one past the last is where outputs are read."""

    def __init__(self, moves: _Moves, window: Window) -> None:
        self.graph, self.plan, self.moves, self.window = moves.graph, moves.plan, moves, window
        self.calls, self.late = self._put_off([op for op in self.graph.ops if op.kind == "call" and op.phase == window])
        outputs = [op for op in self.graph.of_kind("output") if op.phase == window and op.refs]
        self.handed_out = frozenset(held for op in outputs for held in self._reads(op))
        self.end = len(self.calls)
        self.position = {op.name: i for i, op in enumerate(self.calls)}
        self.first: dict[Held, int] = {}
        for i, op in [*enumerate(self.calls), *((self.end, op) for op in outputs)]:
            for held in self._reads(op):
                self.first.setdefault(held, i)
        sources = {(c.value, c.spec): c.source for c in self.plan.copies if c.window == window}
        self.copies = {h: self._source(h, sources) for h in self.first if h.spec != made_as(self.plan, h.ref)}

    def _put_off(self, calls: list[Op]) -> tuple[list[Op], int]:
        """Views and casts of reduced gradients come last, behind the position that is returned: where they stand their first reader would
        wait for the reduction, with backward behind it."""
        late: set[str] = set()
        for op in calls:
            if is_passing(op) and Ref(op.name) in self.moves.gradients:
                ref, spec = op.refs[0], self.plan.ops[op.name].inputs[0]
                if ref.op in late or (ref in self.moves.gradients and spec != made_as(self.plan, ref)):
                    late.add(op.name)
        ordered = sorted(calls, key=lambda op: op.name in late)
        return ordered, len(ordered) - len(late)

    def _reads(self, op: Op) -> tuple[Held, ...]:
        return tuple(Held(r, s) for r, s in zip(op.refs, self.plan.ops[op.name].inputs, strict=True))

    def _source(self, held: Held, sources: Mapping[tuple[str, Spec], str]) -> str:
        if (str(held.ref), held.spec) not in sources:
            raise PlanError(f"the plan has no copy of {held} in the {self.window} window, though an op reads it; plan again")
        return sources[str(held.ref), held.spec]

    def from_earlier(self) -> Iterator[Held]:
        """What this window needs of earlier ones, in the order of first use."""
        for held in self.first:
            if self.graph.window_of(held.ref.op) < self.graph.window_index[self.window]:
                kept = self.copies.get(held) == "kept"
                yield held if kept else Held(held.ref, made_as(self.plan, held.ref))

    def has(self, held: Held) -> bool:
        """Whether this window makes or is handed the value, as a result or as a copy."""
        if held.spec != made_as(self.plan, held.ref):
            return self.copies.get(held) == "made"
        return self.graph.op(held.ref.op).phase == self.window

    def instructions(self, prefetch: int, later: frozenset[Held]) -> tuple[Instruction, ...]:
        """`later`: what windows after this one take."""
        issue, wait = self._communication(prefetch)
        inside = _inside(self.plan, self.moves.mesh)
        out: list[Instruction] = []
        for i, op in enumerate([*self.calls, None]):
            out += issue.get(i, ())
            out += wait.get(i, ())
            if op is not None:
                out.append(self._compute(op, inside.get(op.name, ())))
        lent = states(self.graph)
        stored = frozenset(Held(Ref(op.name), made_as(self.plan, Ref(op.name))) for op in self.graph.of_kind(*STORED) if op.name not in lent)
        return _linked(out, self.handed_out | later | stored)

    def _compute(self, op: Op, inside: tuple[CollectiveCall, ...]) -> Instruction:
        writes = tuple(Held(Ref(op.name, k), s) for k, s in enumerate(self.plan.ops[op.name].outputs) if op.outputs[k] is not None)
        return Instruction("compute", self._reads(op), writes, op.name, calls=inside, nbytes=sum(map(self.moves.nbytes, writes)))

    def _communication(self, prefetch: int) -> tuple[dict[int, list[Instruction]], dict[int, list[Instruction]]]:
        """Redistributions and waits by the position they come before. What may not overlap and is read at the end goes one after
        the other: no compute is left, and each gives back what it sent."""
        issue: dict[int, list[Instruction]] = {}
        wait: dict[int, list[Instruction]] = {}
        flights = self._flights(prefetch)
        order = {id(flight): i for i, flight in enumerate(flights)}
        waits = []
        for group in shared_calls(sorted(flights, key=lambda f: f.at), full_call(in_flight(self.plan.settings))):
            move = _as_one([f.what for f in group])
            issue.setdefault(group[-1].at, []).append(move)
            until, rank = min((f.until, order[id(f)]) for f in group)
            if until == self.end and not move.hideable:
                issue[group[-1].at].append(_wait_for(move))
            else:
                waits.append((until, rank, move))
        for until, _, move in sorted(waits, key=lambda w: w[:2]):
            wait.setdefault(until, []).append(_wait_for(move))
        return issue, wait

    def _flights(self, prefetch: int) -> list[Flight[Instruction]]:
        """Redistributions by where they start and where they are waited for, those with the same end in the order of the waits."""
        gathers: list[int] = []
        used, sent = [], []
        for held in sorted((h for h, source in self.copies.items() if source == "made"), key=self.first.__getitem__):
            at = use = self.first[held]
            flight = self.moves.flight(Held(held.ref, made_as(self.plan, held.ref)), held, at, use)
            if flight.what.hideable:
                ready = self.position.get(held.ref.op, -1) + 1
                ahead = gathers[-prefetch] if len(gathers) >= prefetch else 0
                at = ready if use >= self.late else max(ready, min(ahead, use))
                gathers.append(use)
            (sent if flight.what.hideable and use >= self.late else used).append(replace(flight, at=at))
        return used + self._waited_for_early(sorted(sent, key=lambda f: f.at))

    def _waited_for_early(self, sent: list[Flight[Instruction]]) -> list[Flight[Instruction]]:
        """What leaves the window, in the order of its start: the oldest is waited for when too many bytes are on their way."""
        out: list[Flight[Instruction]] = []
        flying: list[tuple[Flight[Instruction], int]] = []
        most = in_flight(self.plan.settings)
        for flight in sent:
            flying.append((flight, self.moves.nbytes(flight.what.reads[0])))
            while len(flying) > 1 and sum(n for _, n in flying) > most:
                oldest = flying.pop(0)[0]
                out.append(replace(oldest, until=min(oldest.until, flight.at)))
        return out + [flight for flight, _ in flying]


def _inside(plan: Plan, mesh: Mesh) -> dict[str, tuple[CollectiveCall, ...]]:
    """Collectives inside ops, in the order they run: what an op sends first goes over the last mesh axis first."""
    found: dict[str, dict[str, list[CollectiveCall]]] = {}
    for c in plan.collectives:
        if c.inner and c.nbytes:
            found.setdefault(c.op, {}).setdefault(c.axis, []).append(CollectiveCall(c.kind, c.axis, c.nbytes))
    out = {}
    for op, by_axis in found.items():
        rounds = [(k, -mesh.index(axis), call) for axis, calls in by_axis.items() for k, call in enumerate(calls)]
        out[op] = tuple(call for _, _, call in sorted(rounds, key=lambda r: r[:2]))
    return out


def _as_one(moves: list[Instruction]) -> Instruction:
    """Moves whose last calls are one."""
    if len(moves) == 1:
        return moves[0]
    first, last = moves[0], [m.calls[-1] for m in moves]
    shared = CollectiveCall(last[0].kind, last[0].axis, sum(c.nbytes for c in last), tuple(c.nbytes for c in last))
    before = tuple(call for m in moves for call in m.calls[:-1])
    return replace(first, reads=sum((m.reads for m in moves), ()), writes=sum((m.writes for m in moves), ()),
                   steps=sum((m.steps for m in moves), ()), calls=(*before, shared), nbytes=sum(m.nbytes for m in moves))


def _wait_for(move: Instruction) -> Instruction:
    return Instruction("wait", move.writes, hideable=move.hideable)


def _linked(instructions: list[Instruction], keep: frozenset[Held]) -> tuple[Instruction, ...]:
    """Fill `deps`: readers come after what completes what they read, a wait after the start. And `frees`: the last reader of a value
    frees it, of one that nobody reads its maker; a wait is no reader. `keep`: what is left for others."""
    made: dict[Held, int] = {}
    last: dict[Held, int] = {}
    deps = []
    for i, ins in enumerate(instructions):
        deps.append(tuple(sorted({made[h] for h in ins.reads if h in made})))
        complete = ins.reads if ins.kind == "wait" else ins.writes
        made.update(dict.fromkeys(complete, i))
        last.update(dict.fromkeys(complete if ins.kind == "wait" else (*ins.reads, *(complete if ins.kind == "compute" else ())), i))
    frees: dict[int, list[Held]] = {}
    for held, i in last.items():
        if held not in keep:
            frees.setdefault(i, []).append(held)
    return tuple(replace(ins, deps=deps[i], frees=tuple(frees.get(i, ()))) for i, ins in enumerate(instructions))
