"""Graph + Plan -> a local FX graph per window (forward and backward in training), with explicit functional collectives.

They are built directly, node by node: a redistribution becomes its steps' collectives on the logical local
tensor, an op becomes what its rule runs on local tensors. Nothing in them knows the rank: slices and
vocabulary offsets read `coord_<axis>` placeholders, and collectives name their mesh axis. `bind` fills both
in. Every node carries the tensor it makes (a fake one) in `meta["val"]`, so shapes and strides are known
while building, and `meta["part"]`, what it belongs to, for whoever walks the graph later.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.base.graph import BACKWARD, FORWARD, Call, Graph, Op, Ref, TensorMeta, map_args
from autoshard.base.mesh import Mesh
from autoshard.base.plan import OpPlan, Plan, Window
from autoshard.base.roles import Role
from autoshard.base.spec import Spec, is_shard, local_shape, shard_counts
from autoshard.base.windows import is_accumulator
from autoshard.errors import LoweringError
from autoshard.lower.attention_kernels import on_device
from autoshard.lower.emit import Emitter, Part
from autoshard.lower.schedule import (
    Held,
    Instruction,
    Route,
    Schedule,
    WindowSchedule,
    deferred,
    made_as,
    parameter_gradients,
    schedule,
)
from autoshard.rules import registry


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
        windows.append(_Lowering(graph, plan, mesh, order, window, saved_strides(windows)).run())
    return Lowered(mesh, order, tuple(windows))


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
    played = schedule(graph, later, mesh, route)
    window = next(w for w in played.windows if w.name == BACKWARD)
    return _Lowering(graph, later, mesh, played, window, saved_strides((forward,))).run(), _reductions(graph, plan, mesh, route)


def _reductions(graph: Graph, plan: Plan, mesh: Mesh, route: Route) -> LocalGraph:
    emit, ports, pending = Emitter(mesh), [], []
    for op in parameter_gradients(graph):
        meta, made, wanted = graph.meta(op.refs[0]), made_as(plan, op.refs[0]), plan.ops[op.name].inputs[0]
        x = emit.placeholder(op.name, local_tensor_shape(meta, made, mesh), meta.dtype)
        part = Part("redistribute", str(op.refs[0]), BACKWARD, True)
        with emit.part(part):
            steps = route(meta.logical_shape, meta.dtype, made, wanted)
            counts = shard_counts(meta.ndim, made, mesh.sizes)
            pending.append((part, emit.redistribute(x, meta, counts, steps)))
        ports.append(Port(Role.GRADIENT, op.target.name))
    results = []
    for part, started in pending:
        with emit.part(part):
            results.append(emit.complete(started))
    graph_ = emit.finish(results)
    takes = [Port("coord", n.name) if n.name in emit.extra_ports else None for n in graph_.nodes if n.op == "placeholder"]
    order = iter(ports)
    named = tuple(Port(*emit.extra_ports[t.name]) if t else next(order) for t in takes)
    return LocalGraph(BACKWARD, graph_, named, tuple(ports))


@dataclass(frozen=True)
class Context:
    """`rules.types.LocalContext` on FX proxies."""

    call: Call
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    mesh: Mesh
    emit: Emitter

    def axes(self, spec: Spec, dim: int) -> tuple[int, ...]:
        return tuple(i for i, p in enumerate(spec) if p == dim and self.mesh.sizes[i] > 1)

    def ranks(self, axes: Sequence[int]) -> int:
        out = 1
        for a in axes:
            out *= self.mesh.sizes[a]
        return out

    def index(self, axes: Sequence[int]) -> Any:
        return self.emit.index(axes)

    def local_in(self, i: int) -> tuple[int, ...]:
        return local_tensor_shape(self.call.inputs[i], self.inputs[i], self.mesh)

    def local_out(self, i: int) -> tuple[int, ...]:
        return local_tensor_shape(self.call.outputs[i], self.outputs[i], self.mesh)

    def all_reduce(self, x: Any, reduce_op: str, axes: Sequence[int]) -> Any:
        for axis in sorted(axes, reverse=True):
            x = self.emit.wait(self.emit.collective("all_reduce", x, (axis,), reduce_op))
        return x


def local_tensor_shape(meta: TensorMeta, spec: Spec, mesh: Mesh) -> tuple[int, ...]:
    """Shape of the tensor a rank holds, flattened dims flattened."""
    return meta.unflatten(local_shape(meta.logical_shape, spec, mesh.sizes))


def is_dense(t: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlap, in any order of dims."""
    step = 1
    for stride, size in sorted((st, n) for st, n in zip(t.stride(), t.shape, strict=True) if n != 1):
        if stride != step:
            return False
        step *= size
    return True


class _Lowering:
    """Builds one window's graph. `env` holds the proxy of every held value that exists so far; `strides`: of saved values."""

    def __init__(self, graph: Graph, plan: Plan, mesh: Mesh, played: Schedule, work: WindowSchedule,
                 strides: Mapping[Held, tuple[int, ...]]) -> None:
        self.graph, self.plan, self.mesh, self.played, self.work, self.strides = graph, plan, mesh, played, work, strides
        self.window = work.name
        self.emit = Emitter(mesh, seeded=graph.microbatches > 1)
        self.env: dict[Held, Any] = {}
        self.ports: dict[str, Port] = {}
        self.calls: list[Called] = []

    def run(self) -> LocalGraph:
        self._placeholders()
        for instruction in self.work.instructions:
            getattr(self, f"_{instruction.kind}")(instruction)
        gives = self._gives()
        graph = self.emit.finish(self._results(gives))
        ports = {**self.ports, **{n: Port(*p) for n, p in self.emit.extra_ports.items()}}
        takes = tuple(ports[n.name] for n in graph.nodes if n.op == "placeholder")
        return LocalGraph(self.window, graph, takes, tuple(port for port, _ in gives), tuple(self.calls))

    def _placeholders(self) -> None:
        """Parameters and buffers, what is handed in, what earlier windows saved."""
        for op in self.graph.of_kind("param", "buffer", "input"):
            if op.kind != "input" or op.phase == self.window:
                self._placeholder(Port(op.kind, op.target), Held(Ref(op.name), self.plan.ops[op.name].outputs[0]))
        for held in self.work.takes:
            self._placeholder(Port("saved", held), held)
        for op in self.graph.of_kind("tangent"):
            if op.phase == self.window:
                self._placeholder(Port("tangent", op.target), Held(Ref(op.name), self.plan.ops[op.name].outputs[0]))
        for op in filter(is_accumulator, self.graph.ops):
            if op.phase == self.window:
                held = Held(Ref(op.name), self.plan.ops[op.name].outputs[0])
                self._placeholder(Port("accumulator", held), held)

    def _placeholder(self, port: Port, held: Held) -> None:
        meta = self.graph.meta(held.ref)
        proxy = self.emit.placeholder(f"{port.kind}_{held.ref.op}", local_tensor_shape(meta, held.spec, self.mesh),
                                      meta.dtype, self.strides[held] if port.kind == "saved" else None)
        self.ports[proxy.node.name] = port
        self.env[held] = proxy

    def _compute(self, instruction: Instruction) -> None:
        op = self.graph.op(instruction.op)
        if is_accumulator(op):
            self._accumulate(instruction)
            return
        chosen = self.plan.ops[op.name]
        with self.emit.part(Part("compute", op.name, self.window)):
            try:
                reads, results = emit_op(self.emit, op, self.graph.calls[op.name], chosen, [self.env[h] for h in instruction.reads])
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
        with self.emit.part(Part("compute", instruction.op, self.window)):
            into, gradient = self.env[held], self.env[read]
            self.env[held] = torch.ops.aten.add_.Tensor(into, gradient)
        self.env[held].node.meta["held"] = held
        self.calls.append(Called(instruction.op, (self.emit.value(gradient),), (self.emit.value(into),)))

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
        (own,), (held,) = instruction.reads, instruction.writes
        meta = self.graph.meta(held.ref)
        part = Part("redistribute", str(held.ref), self.window, instruction.hideable)
        with self.emit.part(part):
            counts = shard_counts(meta.ndim, own.spec, self.mesh.sizes)
            self.env[held] = self.emit.redistribute(self.env[own], meta, counts, instruction.steps)

    def _wait(self, instruction: Instruction) -> None:
        held = instruction.reads[0]
        with self.emit.part(Part("redistribute", str(held.ref), self.window, instruction.hideable)):
            self.env[held] = self.emit.complete(self.env[held])
        self.env[held].node.meta.setdefault("copy", held)

    def _free(self, instruction: Instruction) -> None:
        """FX code drops a value after its last use by itself."""

    def _gives(self) -> list[tuple[Port, Held]]:
        out = []
        for op in self.graph.of_kind("output"):
            if op.phase == self.window and op.refs:
                out.append((Port(op.target.role, op.target.name), self.played.outputs[op.name]))
        return out + [(Port("saved", held), held) for held in self.work.saves]

    def _result(self, port: Port, held: Held) -> Any:
        if held not in self.env:
            raise LoweringError(f"{port.kind} {port.name} needs {held}, which the {self.window} window does not make")
        return self.env[held]

    def _results(self, gives: list[tuple[Port, Held]]) -> list[Any]:
        """Output values. What the user gets is never an argument itself, nor one tensor twice: autograd would
        attach the model's node to it."""
        out, seen = [], set()
        for port, held in gives:
            value = self._result(port, held)
            if port.kind == Role.USER and (value.node.op == "placeholder" or value.node in seen):
                value = torch.ops.aten.alias.default(value)
            if port.kind == Role.MUTATION:  # the next call takes buffers for contiguous
                value = torch.ops.aten.contiguous.default(value)
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
    result = registry.run_local(Context(call, chosen.inputs, chosen.outputs, emit.mesh, emit), *args, **kwargs)
    value = emit.value(result)
    return reads, [result[i] for i in range(len(value))] if isinstance(value, (tuple, list)) else [result]


def _readable(emit: Emitter, op: Op, x: Any) -> Any:
    """A dense tensor for kernels that read memory by shape alone: layer_norm's backward takes a slice's
    strides for granted and is silently wrong, and so is flash attention on CPU where the last dim is not the innermost,
    as after a gather along it. One device never sees such slices, so nothing is lost there."""
    t = emit.value(x)
    innermost = not t.ndim or t.shape[-1] == 1 or t.stride(-1) == 1
    if emit.mesh.size == 1 or registry.rule_of(op.target).family.any_strides or is_dense(t) and innermost:
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
