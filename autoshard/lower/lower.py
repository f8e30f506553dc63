"""Graph + Plan -> a local FX graph per window (forward and backward in training), with explicit functional collectives.

They are built directly, node by node: a redistribution becomes its steps' collectives on the logical local
tensor, an op becomes what its rule runs on local tensors. Nothing in them knows the rank: slices and
vocabulary offsets read `coord_<axis>` placeholders, and collectives name their mesh axis. `bind` fills both
in. Every node carries the tensor it makes (a fake one) in `meta["val"]`, so shapes and strides are known
while building, and `meta["part"]`, what it belongs to, for whoever walks the graph later.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.base.graph import BACKWARD, FORWARD, Call, Graph, Op, Ref, map_args
from autoshard.base.mesh import Mesh
from autoshard.base.plan import OpPlan, Plan, Window
from autoshard.base.roles import Role
from autoshard.base.spec import is_shard, local_tensor_shape, shard_counts
from autoshard.base.windows import is_accumulator
from autoshard.collectives import KIND_OF
from autoshard.errors import LoweringError
from autoshard.lower.context import Context
from autoshard.lower.emit import Emitter, Part, Pending, is_dense
from autoshard.lower.lifetimes import makers, storages
from autoshard.lower.schedule import (
    CollectiveCall,
    Held,
    Instruction,
    Route,
    Schedule,
    WindowSchedule,
    deferred,
    made_as,
    parameter_gradients,
    reductions,
    schedule,
)
from autoshard.rules import registry
from autoshard.rules.device_kernels import on_device
from autoshard.rules.states import states


@dataclass(frozen=True)
class Port:
    """What a placeholder takes or an output gives. kind: param, buffer, input, tangent, saved, accumulator, coord, seed /
    saved or the `Role` of an output. `name` is the graph's target for it; saved values and accumulators go by their `Held`."""

    kind: str
    name: Any


@dataclass(frozen=True, eq=False)
class Called:
    """An op of the graph in its local form: the fake local tensors that go in and come out (None: absent)."""

    op: str
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor | None, ...]


@dataclass(frozen=True, eq=False)
class LocalGraph:
    """One window. `takes` in placeholder order, `gives` in output order, `calls` the ops in it."""

    window: Window
    graph: torch.fx.Graph
    takes: tuple[Port, ...]
    gives: tuple[Port, ...]
    calls: tuple[Called, ...] = ()


@dataclass(frozen=True, eq=False)
class Lowered:
    """The local graphs of all windows, in order."""

    mesh: Mesh
    schedule: Schedule
    windows: tuple[LocalGraph, ...]

    @property
    def forward(self) -> LocalGraph:
        """Of a training step its forward, of inference all there is."""
        return next(w for w in self.windows if w.window == FORWARD)

    @property
    def backward(self) -> LocalGraph | None:
        """The window that makes gradients; None without training."""
        return next((w for w in self.windows if w.window == BACKWARD), None)


def lower(graph: Graph, plan: Plan, mesh: Mesh, order: Schedule) -> Lowered:
    """The local graphs that work in `order`, the plan's schedule. Raises LoweringError naming the op whose local form cannot be built,
    PlanError for a plan that does not fit the graph."""
    windows: list[LocalGraph] = []
    for window in order.windows:
        windows.append(_lowered(graph, plan, mesh, order, window, saved_strides(windows)))
    return Lowered(mesh, order, tuple(windows))


def _lowered(graph: Graph, plan: Plan, mesh: Mesh, order: Schedule, work: WindowSchedule, strides: Mapping[Held, tuple[int, ...]]) -> LocalGraph:
    """One window. It takes parameters and buffers, what is handed in, what earlier windows saved; it gives outputs and what it saves."""
    takes = []
    for op in graph.of_kind("param", "buffer", "input"):
        if op.kind != "input" or op.phase == work.name:
            takes.append((Port(op.kind, op.target), Held(Ref(op.name), made_as(plan, Ref(op.name)))))
    takes += [(Port("saved", held), held) for held in work.takes]
    takes += [(Port("tangent", op.target), Held(Ref(op.name), made_as(plan, Ref(op.name))))
              for op in graph.of_kind("tangent") if op.phase == work.name]
    sums = (Held(Ref(op.name), made_as(plan, Ref(op.name))) for op in graph.ops if op.phase == work.name and is_accumulator(op))
    takes += [(Port("accumulator", held), held) for held in sums]
    gives = []
    for op in graph.of_kind("output"):
        if op.phase == work.name and op.refs:
            gives.append((Port(op.target.role, op.target.name), order.outputs[op.name]))
    gives += [(Port("saved", held), held) for held in work.saves]
    return _Lowering(graph, plan, mesh, work).run(takes, gives, strides)


def saved_strides(windows: Sequence[LocalGraph]) -> dict[Held, tuple[int, ...]]:
    """How what these windows save lies in memory: later ones get it as it is, and some kernels take their inputs for contiguous."""
    strides = {}
    for window in windows:
        (results,) = next(n for n in window.graph.nodes if n.op == "output").args
        strides |= {port.name: node.meta["val"].stride() for port, node in zip(window.gives, results, strict=True) if port.kind == "saved"}
    return strides


def lower_deferred(graph: Graph, plan: Plan, mesh: Mesh, route: Route, forward: LocalGraph) -> tuple[LocalGraph, LocalGraph]:
    """For `no_sync`: a backward, after `forward`, that hands out parameters' gradients as they are made, and the reductions
    left out of it, from those to the stored placements."""
    later = deferred(graph, plan)
    order = schedule(graph, later, mesh, route)
    window = next(w for w in order.windows if w.name == BACKWARD)
    return _lowered(graph, later, mesh, order, window, saved_strides((forward,))), _reductions(graph, plan, mesh, route)


def _reductions(graph: Graph, plan: Plan, mesh: Mesh, route: Route) -> LocalGraph:
    takes, gives = [], []
    for op in parameter_gradients(graph):
        port = Port(Role.GRADIENT, op.target.name)
        takes.append((port, Held(op.refs[0], made_as(plan, op.refs[0]))))
        gives.append((port, Held(op.refs[0], plan.ops[op.name].inputs[0])))
    return _Lowering(graph, plan, mesh, reductions(graph, plan, mesh, route)).run(takes, gives)


class _Lowering:
    """Builds one window's graph. `env` holds the proxy of every held value that is alive, `pending` what is under way."""

    def __init__(self, graph: Graph, plan: Plan, mesh: Mesh, work: WindowSchedule) -> None:
        self.graph, self.plan, self.mesh, self.work = graph, plan, mesh, work
        self.window = work.name
        seeded = graph.microbatches > 1 or any(op.is_port for op in graph.ops)  # stages of a pipeline draw on one rank each
        self.emit, self.lent = Emitter(mesh, seeded), states(graph)
        self.env: dict[Held, Any] = {}
        self.pending: dict[Held, tuple[Pending, int]] = {}
        self.ports: dict[str, Port] = {}
        self.calls: list[Called] = []

    def run(self, takes: Sequence[tuple[Port, Held]], gives: Sequence[tuple[Port, Held]],
            strides: Mapping[Held, tuple[int, ...]] | None = None) -> LocalGraph:
        """`strides` of saved values; others come in contiguous."""
        for port, held in takes:
            self._placeholder(port, held, strides[held] if strides and port.kind == "saved" else None)
        run = {"compute": self._compute, "redistribute": self._redistribute, "wait": self._wait}
        for instruction in self.work.instructions:
            run[instruction.kind](instruction)
            for held in instruction.frees:
                del self.env[held]
        graph = self.emit.finish(self._results(gives))
        ports = {**self.ports, **{n: Port(*p) for n, p in self.emit.extra_ports.items()}}
        taken = tuple(ports[n.name] for n in graph.nodes if n.op == "placeholder")
        return LocalGraph(self.window, graph, taken, tuple(port for port, _ in gives), tuple(self.calls))

    def _placeholder(self, port: Port, held: Held, strides: tuple[int, ...] | None) -> None:
        meta = self.graph.meta(held.ref)
        proxy = self.emit.placeholder(f"{port.kind}_{held.ref.op}", local_tensor_shape(meta, held.spec, self.mesh), meta.dtype, strides)
        proxy.node.meta["lent"] = held.ref.op in self.lent
        self.ports[proxy.node.name] = port
        self.env[held] = proxy

    def _compute(self, instruction: Instruction) -> None:
        op = self.graph.op(instruction.op)
        if is_accumulator(op):
            self._accumulate(instruction)
            return
        chosen = self.plan.ops[op.name]
        given = [self._alive(held, op.where) for held in instruction.reads]
        with self.emit.part(Part("compute", op.name, self.window, where=op.where)):
            try:
                reads, results = emit_op(self.emit, op, self.graph.calls[op.name], chosen, given)
            except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError) as e:
                raise LoweringError(f"cannot lower {op.where} with inputs {chosen.inputs} and outputs "
                                    f"{chosen.outputs}: {e}") from e
        for held in instruction.writes:
            self.env[held] = self._checked(op, held, results[held.ref.index])
        outputs = tuple(None if m is None else self.emit.value(results[i]) for i, m in enumerate(op.outputs))
        self.calls.append(Called(op.name, tuple(self.emit.value(r) for r in reads), outputs))

    def _accumulate(self, instruction: Instruction) -> None:
        """Add a gradient to its accumulator, in place."""
        (read,), (held,) = instruction.reads, instruction.writes
        into, gradient = (self._alive(h, instruction.op) for h in (held, read))
        with self.emit.part(Part("compute", instruction.op, self.window)):
            self.env[held] = self._checked(self.graph.op(instruction.op), held, torch.ops.aten.add_.Tensor(into, gradient))
        self.calls.append(Called(instruction.op, (self.emit.value(gradient),), (self.emit.value(into),)))

    def _alive(self, held: Held, reader: str) -> Any:
        if held not in self.env:
            raise LoweringError(f"{reader} needs {held}, which the {self.window} window does not make before, or has freed")
        return self.env[held]

    def _checked(self, op: Op, held: Held, result: Any) -> Any:
        meta = self.graph.meta(held.ref)
        want = local_tensor_shape(meta, held.spec, self.mesh)
        got = self.emit.value(result)
        if tuple(got.shape) != want or got.dtype != meta.dtype:
            raise LoweringError(f"{op.where} makes a local {tuple(got.shape)} {got.dtype} for output {held.ref.index}, "
                                f"planned was {want} {meta.dtype} ({held})")
        result.node.meta.setdefault("held", held)
        return result

    def _redistribute(self, instruction: Instruction) -> None:
        prepared = []
        for own, held, steps in zip(instruction.reads, instruction.writes, instruction.steps, strict=True):
            meta, given = self.graph.meta(held.ref), self._alive(own, f"the redistribution to {held}")
            with self._moving(held, instruction):
                prepared.append(self.emit.prepare(given, meta, shard_counts(meta.ndim, own.spec, self.mesh.sizes), steps))
        with self._moving(instruction.writes[0], instruction):
            pending = self.emit.issue(prepared)
        self.pending.update((held, (pending, i)) for i, held in enumerate(instruction.writes))

    def _wait(self, instruction: Instruction) -> None:
        for held in instruction.reads:
            with self._moving(held, instruction):
                self.env[held] = self.emit.complete(*self.pending.pop(held))
            self.env[held].node.meta.setdefault("copy", held)

    def _moving(self, held: Held, instruction: Instruction) -> AbstractContextManager[None]:
        return self.emit.part(Part("redistribute", str(held.ref), self.window, instruction.hideable))

    def _results(self, gives: Sequence[tuple[Port, Held]]) -> list[Any]:
        """Output values. What the user gets is never an argument itself, nor one tensor twice: autograd would
        attach the model's node to it. Nor is it a view of what nobody else sees: the user could not write into it. What is stored has memory
        of its own, which an optimizer or a loaded checkpoint may write."""
        out, seen, made_by = [], set(), makers(self.emit.graph)
        given = [self._alive(held, f"{port.kind} {port.name}") for port, held in gives]
        times, lent = Counter(key for value in given for key in storages(value.node)), {self.graph.op(name).target for name in self.lent}
        for (port, _), value in zip(gives, given, strict=True):
            if port.kind == Role.USER and (value.node.op == "placeholder" or value.node in seen):
                value = torch.ops.aten.alias.default(value)
            elif port.kind == Role.USER and all(times[k] == 1 and made_by[k] not in (value.node, None) for k in storages(value.node)):
                value = self.emit.as_own(value)
            if port.kind == Role.MUTATION:  # the next call takes buffers for contiguous
                value = torch.ops.aten.contiguous.default(value)
                if port.name not in lent and any(times[k] > 1 or made_by.get(k, value) is None for k in storages(value.node)):
                    value = torch.ops.aten.clone.default(value)
            seen.add(value.node)
            out.append(value)
        return out


def emit_op(emit: Emitter, op: Op, call: Call, chosen: OpPlan, tensors: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Write what one rank runs for `op`: (the tensors it really reads, its outputs)."""
    reads = [_readable(emit, op, x) for x in tensors]
    left = iter(reads)

    def fill(leaf: Any) -> Any:
        return next(left) if isinstance(leaf, Ref) else leaf

    args = _as_lists(map_args(fill, op.args))
    kwargs = {k: _as_lists(map_args(fill, v), top=False) for k, v in op.kwargs}
    shards = tuple(a for a in range(emit.mesh.ndim) if any(is_shard(s[a]) for s in chosen.outputs))
    emit.random_key = (op.name, shards)
    result = registry.run_local(Context(call, chosen.inputs, chosen.outputs, emit.mesh, emit, op.where), *args, **kwargs)
    value = emit.value(result)
    return reads, [result[i] for i in range(len(value))] if isinstance(value, (tuple, list)) else [result]


def _readable(emit: Emitter, op: Op, x: Any) -> Any:
    """A dense tensor for kernels that read memory by shape alone: layer_norm's backward takes a slice's
    strides for granted and is silently wrong, and so is flash attention on CPU where the last dim is not the innermost,
    as after a gather along it. One device never sees such slices, so nothing is lost there. Attention takes q, k and v as the parts of one
    tensor that they are, without a copy of each in every layer."""
    t, family = emit.value(x), registry.rule_of(op.target).family
    innermost = not t.ndim or t.shape[-1] == 1 or t.stride(-1) == 1
    if emit.mesh.size == 1 or family.any_strides or innermost and (family.any_rows or is_dense(t)):
        return x
    return torch.ops.aten.contiguous.default(x)


def _as_lists(value: Any, top: bool = True) -> Any:
    """Aten wants sequences as lists; graphs keep tuples. The outermost tuple is the argument list itself."""
    if isinstance(value, tuple):
        inner = [_as_lists(v, top=False) for v in value]
        return tuple(inner) if top else inner
    return value


def bind(local: LocalGraph, coordinates: Sequence[int], group: Callable[[str], str], mesh: Mesh,
         device: torch.device) -> tuple[torch.fx.GraphModule, tuple[Port, ...]]:
    """A module for one rank, and what it takes: coordinates become constants, mesh axes ("dp", or "dp+tp" taken as one) the
    names of their process groups, which `group` says, factories build on `device`, and CPU kernels become its own."""
    graph = torch.fx.Graph()
    values: dict[torch.fx.Node, Any] = {}
    takes = []
    ports = iter(local.takes)
    for node in local.graph.nodes:
        if node.op == "placeholder":
            port = next(ports)
            if port.kind == "coord":
                values[node] = coordinates[mesh.index(port.name)]
                continue
            takes.append(port)
        values[node] = _bound(node, graph, values, group, device)
    graph.lint()
    return torch.fx.GraphModule(torch.nn.Module(), graph), tuple(takes)


def _bound(node: torch.fx.Node, graph: torch.fx.Graph, values: dict[torch.fx.Node, Any], group: Callable[[str], str],
           device: torch.device) -> Any:
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
    if node.op == "call_function":
        if not isinstance(node.meta["val"], (torch.Tensor, tuple, list)) and not _has_node((args, kwargs)):
            return node.target(*args, **kwargs)  # arithmetic on coordinates
        args, kwargs = torch.fx.node.map_aggregate((args, kwargs), lambda a: _named(a, group))
        if makes_tensor_from_nothing(node):
            kwargs = {**kwargs, "device": device}
    target = on_device(node.target, device) if node.op == "call_function" else node.target
    new = graph.create_node(node.op, target, args, kwargs, node.name)
    new.meta = dict(node.meta)
    return new


def call_of(node: torch.fx.Node, axis: str) -> CollectiveCall:
    """A node that starts a collective over `axis`, in the words of the schedule."""
    kind = KIND_OF[node.target]
    nbytes = kind.call_bytes(node.args[1:], node.args[0].meta["val"], node.meta["val"])
    return CollectiveCall(kind.name, axis, nbytes, node.meta.get("bucket", ()))


def _has_node(value: Any) -> bool:
    found: list[torch.fx.Node] = []
    torch.fx.node.map_arg(value, lambda n: found.append(n) or n)
    return bool(found)


def makes_tensor_from_nothing(node: torch.fx.Node) -> bool:
    """A factory: it has a `device` argument and no tensor to take the device from."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    tensors = [n for n in node.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)]
    return not tensors and any(a.name == "device" for a in node.target._schema.arguments)


def _named(leaf: Any, group: Callable[[str], str]) -> Any:
    """Mesh axes by their process-group names."""
    if isinstance(leaf, str) and leaf.startswith("axis:"):
        return group(leaf.removeprefix("axis:"))
    return leaf
