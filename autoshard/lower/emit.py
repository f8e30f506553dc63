"""Writes FX nodes for one rank: ops on local tensors, collectives, slices; each with a fake value.

Because the fake value of every node is known as it is written, layout questions are settled here: a view
that the local strides do not allow becomes a reshape, a copy that would change nothing is left out.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch.fx.proxy import GraphAppendingTracer, Proxy
from torch.overrides import TorchFunctionMode

from autoshard import _torch
from autoshard.base.graph import TensorMeta
from autoshard.base.mesh import Mesh
from autoshard.base.random import seeded
from autoshard.collectives import KIND_OF, RUN
from autoshard.collectives.all_to_all_rows import ALL_TO_ALL_ROWS
from autoshard.cost.redistribute import SLICE
from autoshard.errors import LoweringError
from autoshard.program.interpret import VIEWS
from autoshard.program.opaque.opaque import Opaque, SeededOpaque
from autoshard.program.tracing.tape import is_random

aten = torch.ops.aten
LAID_AS_PRODUCTS = frozenset({
    aten.softplus_backward.default, aten.elu_backward.default, aten.hardtanh_backward.default, aten.hardsigmoid_backward.default,
    aten.hardswish_backward.default, aten.native_dropout_backward.default, aten.logit_backward.default, aten.xlogy.Tensor, aten.copysign.Tensor})
"""Of these a fake result is contiguous where the kernel's lies as the first of its tensors does: as their product."""


@dataclass(frozen=True)
class Part:
    """What a node belongs to: the op it computes, or the value it redistributes. `where`: the op for messages."""

    kind: str
    name: str
    window: str
    hideable: bool = False
    where: str = field(default="", compare=False)


@dataclass(frozen=True)
class Prepared:
    """A redistribution up to its last collective: `x` is what that one (`step`, None where there is none) is called on, `rest` turns
    its result into the value."""

    x: Proxy
    step: Any
    rest: tuple[Callable[[Proxy], Proxy], ...]


@dataclass(frozen=True)
class Pending:
    """Redistributions whose last collective has been started, by one call; `rests` turn its result into the value of each."""

    started: Proxy
    rests: tuple[tuple[Callable[[Proxy], Proxy], ...], ...]


class _Tracer(GraphAppendingTracer):
    """Appends nodes through the emitter, which gives each its fake value."""

    def __init__(self, emit: "Emitter") -> None:
        super().__init__(emit.graph)
        self.emit = emit

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, name: Any = None, type_expr: Any = None) -> Any:
        if kind != "call_function":
            return super().create_node(kind, target, args, kwargs, name, type_expr)
        return self.emit.node(target, args, kwargs, super().create_node)

    def iter(self, obj: Proxy) -> Iterator[Any]:
        return iter([obj[i] for i in range(len(self.emit.value(obj)))])


class _Recording(TorchFunctionMode):
    """Writes every aten call down, factories too, which have no proxy among their arguments to say so."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, (torch._ops.OpOverload, Opaque)):
            return self.tracer.create_proxy("call_function", func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class Emitter:
    """Builds one FX graph. `random_key`: (op name, mesh axes that shard its result), for random ops. `seeded`: they draw under a seed also
    on one rank."""

    def __init__(self, mesh: Mesh, seeded: bool = False) -> None:
        self.mesh, self.graph, self.seeded = mesh, torch.fx.Graph(), seeded or mesh.size > 1
        self.fake = _torch.fake_mode()
        self.tracer = _Tracer(self)
        self.extra_ports: dict[str, tuple[str, str]] = {}
        self.random_key: tuple[str, tuple[int, ...]] = ("", ())
        self._extra: dict[str, Proxy] = {}
        self._done: dict[torch.fx.Node, Proxy] = {}
        self._part: Part | None = None
        self._count = 0

    @contextmanager
    def part(self, part: Part) -> Iterator[None]:
        """What is written inside belongs to `part`."""
        self._part = part
        try:
            with _Recording(self.tracer):
                yield
        finally:
            self._part = None

    # --- nodes and values ---

    def value(self, proxy: Any) -> Any:
        """The fake value of a proxy; of a tuple of proxies, the tuple of theirs."""
        if isinstance(proxy, (tuple, list)):
            return tuple(self.value(p) for p in proxy)
        return proxy.node.meta["val"] if isinstance(proxy, Proxy) else proxy

    def placeholder(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None = None) -> Proxy:
        """An argument of the graph, contiguous without `strides`. `name` is made a Python name; the count keeps names apart."""
        self._count += 1
        with self.fake:
            value = torch.empty(shape, dtype=dtype) if strides is None else torch.empty_strided(shape, strides, dtype=dtype)
            return self._placeholder(f"{re.sub(r'[^0-9A-Za-z]', '_', name)}_{self._count}", value)

    def _placeholder(self, name: str, value: Any) -> Proxy:
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        return Proxy(node, self.tracer)

    def _number(self, kind: str, name: str) -> Proxy:
        """An int placeholder at the front of the graph: a coordinate or the seed. Made at first use."""
        label = f"{kind}_{name}" if name else kind
        if label not in self._extra:
            with self.graph.inserting_before(next(iter(self.graph.nodes), None)):
                self._extra[label] = self._placeholder(label, 0)
            self.extra_ports[self._extra[label].node.name] = (kind, name)
        return self._extra[label]

    def node(self, target: Any, args: Any, kwargs: Any, create: Callable[..., torch.fx.Node]) -> torch.fx.Node:
        """Append a call with its fake value, or return an existing node that already is the result."""
        if self.seeded and _is_random(target, args, kwargs):
            name, axes = self.random_key
            args = (self._number("seed", "").node, crc32(name.encode()), _node(self.index(axes)), *args)
            target, args = (SeededOpaque(target), args) if isinstance(target, Opaque) else (seeded, (target, *args))
        if target in VIEWS:
            args = (_viewed(args[0]), *args[1:])
        vals, named = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        if _changes_nothing(target, vals):
            return args[0]
        target, value = self._evaluate(target, vals, named)
        node = create("call_function", target, args, kwargs)
        node.meta.update(val=value, part=self._part)
        return node

    def _evaluate(self, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if target is seeded:
            return target, self._evaluate(args[0], args[4:], kwargs)[1]
        if target in VIEWS and not _can_view(*args):
            target = aten.reshape.default
        with self.fake, torch.no_grad():
            made = target(*args, **kwargs)
            return target, torch.empty_like(_product(args), dtype=made.dtype) if target in LAID_AS_PRODUCTS else made

    def as_own(self, x: Proxy) -> Proxy:
        """`x`, for autograd no view: it may be written into."""
        node, value = self.graph.call_function(aten._unsafe_view.default, (x.node, list(self._shape(x)))), self.value(x)
        with self.fake, torch.no_grad():
            node.meta.update(val=aten._unsafe_view.default(value, list(value.shape)), part=x.node.meta["part"])
        return Proxy(node, self.tracer)

    def finish(self, results: Sequence[Proxy]) -> torch.fx.Graph:
        """Close the graph with its outputs and drop what none of them needs, collectives included."""
        self.graph.output(tuple(r.node for r in results))
        self.graph.eliminate_dead_code(is_impure_node=lambda n: n.op == "output")
        self.graph.lint()
        return self.graph

    # --- the rank ---

    def index(self, axes: Sequence[int]) -> Any:
        """Which piece this rank holds over `axes`, major first: arithmetic on coordinates."""
        key = tuple(a for a in axes if self.mesh.sizes[a] > 1)
        out: Any = 0
        for i, a in enumerate(key):
            coordinate = self._number("coord", self.mesh.names[a])
            out = coordinate if i == 0 else out * self.mesh.sizes[a] + coordinate
        return out

    # --- collectives ---

    def collective(self, kind: str, x: Proxy, axes: Sequence[int], reduce_op: str = "") -> Proxy:
        """Start a collective over `axes` taken as one, on a contiguous tensor; gathers and scatters work on dim 0. Of a tensor of
        size 0 nothing is sent."""
        group, n = f"axis:{self.mesh.label(axes)}", self.mesh.ranks(axes)
        if not self.value(x).numel():
            return self._of_nothing(kind, x, n)
        x = aten.contiguous.default(x)
        if kind not in RUN:
            raise LoweringError(f"no collective of kind {kind!r}; there are {', '.join(RUN)}")
        rows = next(iter(self.value(x).shape), 1)
        return RUN[kind].target(x, *RUN[kind].arguments(rows, n, reduce_op), group)

    def rows_apart(self, x: Proxy, sends: Proxy, gets: Proxy, room: int, where: str, balanced: int, axis: int) -> Proxy:
        """Start the all-to-all of rows over one mesh axis. `where`: for its errors."""
        return ALL_TO_ALL_ROWS.target(aten.contiguous.default(x), sends, gets, room, where, balanced, f"axis:{self.mesh.label((axis,))}")

    def _of_nothing(self, kind: str, x: Proxy, n: int) -> Proxy:
        """What the collective would make: a tensor of size 0 as well."""
        rows, *rest = self._shape(x) or [1]
        made = RUN[kind].runs.rows(rows, n)
        return x if made == rows else aten.new_empty.default(x, [made, *rest])

    def wait(self, x: Proxy) -> Proxy:
        """The result of what was started, for which the program waits once."""
        if x.node.target not in KIND_OF:
            return x
        if x.node not in self._done:
            self._done[x.node] = _torch.WAIT(x)
        return self._done[x.node]

    def prepare(self, x: Proxy, meta: TensorMeta, counts: Sequence[int], steps: Sequence[Any]) -> Prepared:
        """Run `steps` on `x`, a local tensor cut into `counts` pieces per logical dim, up to the last collective."""
        work: list[Callable[[Proxy], Proxy]] = []
        if meta.is_flat:
            logical = [n // c for n, c in zip(meta.logical_shape, counts, strict=True)]
            work.append(lambda x: aten.view.default(x, logical))
        at, last = len(work), None
        for step in steps:
            if step.kind == SLICE:
                work.append(partial(self._slice, dim=step.dst_dim, axes=step.axes))
                continue
            kind, n = self._kind(step), self.mesh.ranks(step.axes)
            work.append(partial(self._before, kind, step, n))
            at, last = len(work), step
            work += [partial(self._call, step), partial(self._after, kind, step, n)]
        if meta.is_flat:
            work.append(lambda x: aten.view.default(x, list(meta.unflatten(tuple(self.value(x).shape)))))
        for do in work[:at] if last else ():
            x = do(x)
        return Prepared(x, last, tuple(work[at + 1:] if last else work))

    def issue(self, prepared: Sequence[Prepared]) -> Pending:
        """Start the last collective of each, by one call where there are several: they must agree in kind, axes and dtype."""
        if len(prepared) > 1:
            return self._issue_together(prepared)
        (one,) = prepared
        return Pending(one.x if one.step is None else self._call(one.step, one.x), (one.rest,))

    def _issue_together(self, prepared: Sequence[Prepared]) -> Pending:
        """Rows of the buffer are what each rank gets: all of it for an all-reduce, its piece for a reduce-scatter."""
        step = prepared[0].step
        rows = 1 if RUN[step.kind].runs.whole else self.mesh.ranks(step.axes)
        flat = [aten.view.default(p.x, [rows, self.value(p.x).numel() // rows]) for p in prepared]
        started = self._call(step, aten.cat.default(flat, 1))
        started.node.meta["bucket"] = tuple(self.value(p.x).numel() * self.value(p.x).dtype.itemsize for p in prepared)
        rests, at = [], 0
        for p, x in zip(prepared, flat, strict=True):
            first, *more = self._shape(p.x) or [1]
            shape = [RUN[step.kind].runs.rows(first, self.mesh.ranks(step.axes)), *more] if self._shape(p.x) else []
            size = self._shape(x)[1]
            rests.append((partial(self._piece, start=at, size=size, shape=shape), *p.rest))
            at += size
        return Pending(started, tuple(rests))

    def _piece(self, buffer: Proxy, start: int, size: int, shape: Sequence[int]) -> Proxy:
        """A tensor out of the buffer that it shares with others."""
        return aten.view.default(aten.slice.Tensor(self.wait(buffer), 1, start, start + size), shape)

    def complete(self, pending: Pending, which: int = 0) -> Proxy:
        """The value of redistribution number `which`."""
        x = pending.started
        for do in pending.rests[which]:
            x = do(x)
        return x

    def _kind(self, step: Any) -> Any:
        if step.kind not in RUN:
            raise LoweringError(f"no redistribution step of kind {step.kind!r}; there are {SLICE}, {', '.join(RUN)}")
        return RUN[step.kind]

    def _before(self, kind: Any, step: Any, n: int, x: Proxy) -> Proxy:
        return aten.contiguous.default(kind.before(self, x, step, n))

    def _call(self, step: Any, x: Proxy) -> Proxy:
        return self.collective(step.kind, x, step.axes, step.reduce_op)

    def _after(self, kind: Any, step: Any, n: int, x: Proxy) -> Proxy:
        return kind.after(self, self.wait(x), step, n)

    def _shape(self, x: Proxy) -> list[int]:
        return list(self.value(x).shape)

    def at_least_1d(self, x: Proxy) -> Proxy:
        return x if self._shape(x) else aten.view.default(x, [1])

    def _slice(self, x: Proxy, dim: int, axes: Sequence[int]) -> Proxy:
        length = self._shape(x)[dim] // self.mesh.ranks(axes)
        start = self.index(axes) * length
        return aten.slice.Tensor(x, dim, start, start + length, 1)

    def split(self, x: Proxy, dim: int, n: int) -> Proxy:
        """Dim of size n*k as two dims, n and k."""
        shape = self._shape(x)
        return aten.view.default(x, [*shape[:dim], n, shape[dim] // n, *shape[dim + 1:]])

    def cut(self, x: Proxy, dim: int, n: int) -> Proxy:
        """The n pieces along `dim`, stacked in front."""
        pieces = self.split(x, dim, n)
        order = [dim, *(d for d in range(len(self._shape(pieces))) if d != dim)]
        return self._permute(pieces, order)

    def join(self, pieces: Proxy, dim: int) -> Proxy:
        """Inverse of `_cut`: pieces stacked in front, put one after another along `dim`."""
        shape = self._shape(pieces)
        order = [*range(1, dim + 1), 0, *range(dim + 1, len(shape))]
        joined = [*shape[1:dim + 1], shape[0] * shape[dim + 1], *shape[dim + 2:]]
        return aten.view.default(self._permute(pieces, order), joined)

    def _permute(self, x: Proxy, order: list[int]) -> Proxy:
        shape = self._shape(x)
        moved = [d for d in order if shape[d] != 1]
        if moved == sorted(moved):  # only dims of size 1 move: same memory, a free view
            return aten.view.default(x, [shape[d] for d in order])
        return aten.permute.default(x, order)

    def drop_first(self, x: Proxy) -> Proxy:
        return aten.view.default(x, self._shape(x)[1:])


def _node(value: Any) -> Any:
    return value.node if isinstance(value, Proxy) else value


def _viewed(node: torch.fx.Node) -> torch.fx.Node:
    """The tensor that a view of a view looks at, if any shape can be viewed on it."""
    while node.target in VIEWS and node.args[0].meta["val"].is_contiguous():
        node = node.args[0]
    return node


def _product(args: Sequence[Any]) -> torch.Tensor:
    first, second = (a for a in args if isinstance(a, torch.Tensor))
    return first * second


def _can_view(x: torch.Tensor, shape: Sequence[int]) -> bool:
    """Whether the strides of `x` allow it without a copy. Asked of a meta tensor: fake ones say yes to merging dims across a dim
    of size 1 where kernels say no."""
    try:
        aten.view.default(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), list(shape))
    except RuntimeError:
        return False
    return True


def _changes_nothing(target: Any, args: Any) -> bool:
    if target in VIEWS:
        return tuple(args[0].shape) == tuple(args[1])
    return target is aten.contiguous.default and len(args) == 1 and args[0].is_contiguous()


def _is_random(target: Any, args: Any, kwargs: Any) -> bool:
    """Ops that draw numbers; attention draws only with dropout."""
    if not is_random(target) or isinstance(target, Opaque):
        return is_random(target)
    for i, arg in enumerate(target._schema.arguments):
        if arg.name == "dropout_p":
            return (args[i] if i < len(args) else kwargs.get("dropout_p", arg.default_value)) != 0.0
    return True


def is_dense(t: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlap, in any order of dims."""
    step = 1
    for stride, size in sorted((st, n) for st, n in zip(t.stride(), t.shape, strict=True) if n != 1):
        if stride != step:
            return False
        step *= size
    return True
