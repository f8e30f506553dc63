"""Graph + Plan -> Schedule: what one rank does, in order, in each window of the step (forward and backward in training).

A value is *held* in a spec. Ops make held values, redistributions make further ones, each (value, window,
spec) once however many ops read it. The order is a function of the graph and the plan alone, so all ranks
issue the same collectives in the same order.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from autoshard.base.graph import Graph, Op, Ref
from autoshard.base.mesh import Mesh
from autoshard.base.plan import AT_THE_END, Plan, Window
from autoshard.base.roles import Role
from autoshard.base.spec import Spec, format_spec
from autoshard.cost.memory import value_bytes
from autoshard.errors import PlanError
from autoshard.program.flow import gradient_bound, param_derived

Route = Callable[[tuple[int, ...], Any, Spec, Spec], "tuple[Any, ...]"]
"""(logical shape, dtype, source spec, target spec) -> steps: `cost.redistribute.Redistribution.steps`."""
STORED = ("param", "buffer")
IN_FLIGHT = 64 << 20
"""Bytes of gradients on their way to other ranks at once. A collective keeps what it sends, so without a bound every rank would
hold all gradients unreduced at the end of backward."""


@dataclass(frozen=True, order=True)
class Held:
    """A value as it lies on the ranks."""

    ref: Ref
    spec: Spec

    def __str__(self) -> str:
        return f"{self.ref}[{format_spec(self.spec)}]"


@dataclass(frozen=True)
class Instruction:
    """One step of a window. `deps` are positions of the instructions that make what it reads; nbytes are per
    rank: made (compute, redistribute) or given back (free)."""

    kind: Literal["compute", "redistribute", "wait", "free"]
    reads: tuple[Held, ...] = ()
    writes: tuple[Held, ...] = ()
    op: str = ""
    steps: tuple[Any, ...] = ()
    hideable: bool = False
    nbytes: int = 0
    deps: tuple[int, ...] = ()

    @property
    def stream(self) -> Literal["compute", "communication"]:
        return "communication" if self.kind == "redistribute" else "compute"


@dataclass(frozen=True)
class WindowSchedule:
    """One window. `takes`: the values of earlier windows that it reads (stored parameters and buffers are not among them), in
    the order of first use; `saves`: what later windows take of those that it makes."""

    name: Window
    instructions: tuple[Instruction, ...]
    takes: tuple[Held, ...] = ()
    saves: tuple[Held, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """The windows in order. `outputs`: per output op, the held value it hands out."""

    windows: tuple[WindowSchedule, ...]
    outputs: Mapping[str, Held]


def schedule(graph: Graph, plan: Plan, mesh: Mesh, route: Route, prefetch: int = 2) -> Schedule:
    """Play `plan`. Hideable gathers are issued `prefetch` gathers ahead of their use; gradient reductions as soon as the
    gradient exists, waited for at the end, or, the oldest first, when more than `IN_FLIGHT` bytes are on their way, or all at
    the end where the plan's settings say so. Raises PlanError where the plan lacks an op or a copy."""
    missing = [op.name for op in graph.ops if op.name not in plan.ops]
    if missing:
        raise PlanError(f"the plan has no specs for op {missing[0]!r} ({len(missing)} in all); it was made for another graph")
    hideable = param_derived(graph) | (frozenset() if reduces_at_the_end(plan.settings) else gradient_bound(graph))
    windows = [_Window(graph, plan, mesh, route, hideable, w.name) for w in graph.windows]
    takes = [tuple(dict.fromkeys(h for h in w.from_earlier() if graph.op(h.ref.op).kind not in STORED or h.spec != made_as(plan, h.ref)))
             for w in windows]
    done = []
    for i, w in enumerate(windows):
        later = tuple(dict.fromkeys(h for taken in takes[i + 1:] for h in taken))
        saves = tuple(h for h in later if h not in takes[i] and w.has(h))
        done.append(WindowSchedule(w.window, w.instructions(prefetch, {*later}), takes[i], saves))
    outputs = {op.name: Held(op.refs[0], plan.ops[op.name].inputs[0]) for op in graph.of_kind("output") if op.refs}
    return Schedule(tuple(done), outputs)


def reduces_at_the_end(settings: Mapping[str, Any]) -> bool:
    """Whether a plan of these settings reduces gradients when backward is through: in nobody's shadow."""
    return AT_THE_END.items() <= dict(settings).items()


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


class _Window:
    """Orders one window. Positions count the window's ops; the one past the last is where outputs are read."""

    def __init__(self, graph: Graph, plan: Plan, mesh: Mesh, route: Route, hideable: frozenset[Ref],
                 window: Window) -> None:
        self.graph, self.plan, self.mesh, self.route, self.window = graph, plan, mesh, route, window
        self.hideable = hideable
        self.calls = [op for op in graph.ops if op.kind == "call" and op.phase == window]
        outputs = [op for op in graph.of_kind("output") if op.phase == window and op.refs]
        self.end = len(self.calls)
        self.position = {op.name: i for i, op in enumerate(self.calls)}
        self.first: dict[Held, int] = {}
        self.last: dict[Held, int] = {}
        for i, op in [*enumerate(self.calls), *((self.end, op) for op in outputs)]:
            for held in self._reads(op):
                self.first.setdefault(held, i)
                self.last[held] = i
        sources = {(c.value, c.spec): c.source for c in plan.copies if c.window == window}
        self.copies = {h: self._source(h, sources) for h in self.first if h.spec != made_as(plan, h.ref)}

    def _reads(self, op: Op) -> tuple[Held, ...]:
        return tuple(Held(r, s) for r, s in zip(op.refs, self.plan.ops[op.name].inputs, strict=True))

    def _source(self, held: Held, sources: Mapping[tuple[str, Spec], str]) -> str:
        if (str(held.ref), held.spec) not in sources:
            raise PlanError(f"the plan has no copy of {held} in the {self.window} window, though an op reads it; plan again")
        return sources[str(held.ref), held.spec]

    def _moves(self) -> Iterator[tuple[Held, Held]]:
        """(held before, held after) of every redistribution of this window."""
        for held, source in self.copies.items():
            if source == "made":
                yield Held(held.ref, made_as(self.plan, held.ref)), held

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

    def instructions(self, prefetch: int, keep: set[Held]) -> tuple[Instruction, ...]:
        issue, wait = self._communication(prefetch)
        dying = self._deaths(keep)
        out: list[Instruction] = []
        for i, op in enumerate([*self.calls, None]):
            out += issue.get(i, ())
            out += wait.get(i, ())
            if op is not None:
                out.append(self._compute(op))
                out += (Instruction("free", (h,), nbytes=self._bytes(h)) for h in dying.get(i, ()))
        return _linked(out)

    def _communication(self, prefetch: int) -> tuple[dict[int, list[Instruction]], dict[int, list[Instruction]]]:
        """Redistributions and waits by the position they come before."""
        issue: dict[int, list[Instruction]] = {}
        wait: dict[int, list[Instruction]] = {}
        gathers: list[int] = []
        sent: list[tuple[int, Instruction, int]] = []
        for own, held in sorted(self._moves(), key=lambda move: self.first[move[1]]):
            move = self._redistribute(own, held)
            at = use = self.first[held]
            if move.hideable:
                ready = self.position.get(held.ref.op, -1) + 1
                ahead = gathers[-prefetch] if len(gathers) >= prefetch else 0
                at = ready if use == self.end else max(ready, min(ahead, use))
                gathers.append(use)
            issue.setdefault(at, []).append(move)
            waiting = Instruction("wait", (held,), hideable=move.hideable)
            if use != self.end:
                wait.setdefault(use, []).append(waiting)
            elif move.hideable:
                sent.append((at, waiting, self._bytes(own)))
            else:
                issue[at].append(waiting)  # no compute is left: one after the other, each giving back what it sent
        self._wait_for_gradients(sorted(sent, key=lambda s: s[0]), wait)
        return issue, wait

    def _wait_for_gradients(self, sent: list[tuple[int, Instruction, int]], wait: dict[int, list[Instruction]]) -> None:
        """Waits for what leaves the window, given (issued at, wait, bytes) in the order of issue."""
        flying: list[tuple[Instruction, int]] = []
        for at, waiting, nbytes in sent:
            flying.append((waiting, nbytes))
            while len(flying) > 1 and sum(n for _, n in flying) > IN_FLIGHT:
                wait.setdefault(at, []).append(flying.pop(0)[0])
        wait.setdefault(self.end, []).extend(w for w, _ in flying)

    def _deaths(self, keep: set[Held]) -> dict[int, list[Held]]:
        """Values by the position of their last reader; what outputs or the other window read stays."""
        last = dict(self.last)
        for own, held in self._moves():
            last[own] = max(last.get(own, -1), self.first[held])
        for op in self.calls:
            for held in self._writes(op):
                last.setdefault(held, self.position[op.name])
        out: dict[int, list[Held]] = {}
        for held, i in last.items():
            stored = self.graph.op(held.ref.op).kind in STORED and held not in self.copies
            if held not in keep and not stored:
                out.setdefault(i, []).append(held)
        return out

    def _bytes(self, held: Held) -> int:
        return value_bytes(self.graph.meta(held.ref), held.spec, self.mesh)

    def _redistribute(self, own: Held, held: Held) -> Instruction:
        meta = self.graph.meta(held.ref)
        steps = tuple(self.route(meta.logical_shape, meta.dtype, own.spec, held.spec))
        return Instruction("redistribute", (own,), (held,), steps=steps, nbytes=self._bytes(held),
                           hideable=own.ref in self.hideable)

    def _writes(self, op: Op) -> tuple[Held, ...]:
        return tuple(Held(Ref(op.name, k), s) for k, s in enumerate(self.plan.ops[op.name].outputs)
                     if op.outputs[k] is not None)

    def _compute(self, op: Op) -> Instruction:
        writes = self._writes(op)
        return Instruction("compute", self._reads(op), writes, op.name, nbytes=sum(map(self._bytes, writes)))


def _linked(instructions: list[Instruction]) -> tuple[Instruction, ...]:
    """Fill `deps`: readers wait for the makers of what they read, compute also for the wait on a copy."""
    made: dict[Held, int] = {}
    out = []
    for i, ins in enumerate(instructions):
        out.append(replace(ins, deps=tuple(sorted({made[h] for h in ins.reads if h in made}))))
        for held in ins.reads if ins.kind == "wait" else ins.writes:
            made[held] = i
    return tuple(out)
