"""Graph -> smaller Graph with the same results: fold what changes nothing, share equal ops, drop dead ones.

Works in passes over the ops, nearly always two; every fold is exact in floating point. See docs/trace.md for the list.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autoshard.base.graph import Graph, Op, Ref, TensorMeta
from autoshard.base.roles import Role
from autoshard.program.apart.rewrite import with_parts_apart
from autoshard.program.flow import gradients_at_once
from autoshard.program.grouped_heads import with_grouped_heads
from autoshard.program.tracing.tape import is_random
from autoshard.rules import registry

aten = torch.ops.aten
EMPTY = (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default)


def stats(graph: Graph) -> dict[str, int]:
    """Number of ops per target, most frequent first."""
    return dict(Counter(str(op.target) for op in graph.of_kind("call")).most_common())


def simplify(graph: Graph) -> Graph:
    """An equal graph with fewer ops, the last of every gradient as soon as it can be. Names, phases and source lines of the ops
    that stay are kept. Sharing equal ops and dropping dead ones can free a view for a fold, so passes run until one finds nothing:
    simplifying twice must not give another graph, or a plan of the one would not fit the other."""
    while (smaller := with_parts_apart(with_grouped_heads(_one_pass(graph)))).ops != graph.ops:
        graph = smaller
    return gradients_at_once(smaller)


def _one_pass(graph: Graph) -> Graph:
    state = _State({r: len(u) for r, u in graph.users.items()}, frozenset(_returned(graph)))
    for op in graph.ops:
        state.visit(op)
    return _without_dead(replace(graph, ops=tuple(state.ops.values())))


def _returned(graph: Graph) -> Iterator[Any]:
    """What leaves the graph; and what the user gets a view of."""
    for op in graph.of_kind("output"):
        yield (ref := op.args[0])
        while op.target.role is Role.USER and isinstance(ref, Ref) and registry.is_view(graph.op(ref.op)) and graph.op(ref.op).refs:
            yield (ref := graph.op(ref.op).refs[0])


@dataclass
class _State:
    uses: Mapping[Ref, int]
    returned: frozenset[Ref]
    ops: dict[str, Op] = field(default_factory=dict)
    same: dict[Ref, Ref] = field(default_factory=dict)
    first: dict[Any, str] = field(default_factory=dict)

    def meta(self, ref: Ref) -> TensorMeta | None:
        return self.ops[ref.op].outputs[ref.index]

    def maker(self, ref: Any, *targets: Any) -> Op | None:
        """The op that made `ref`, when it is a call of one of `targets`."""
        op = self.ops[ref.op] if isinstance(ref, Ref) else None
        return op if op is not None and op.kind == "call" and op.target in targets else None

    def visit(self, op: Op) -> None:
        op = self._renamed(op)
        if op.kind == "call":
            fold = FOLDS.get(op.target)
            folded = fold(op, self) if fold else op
            if isinstance(folded, Ref):
                self.same[Ref(op.name)] = folded
                return
            op = folded
            key = None if is_random(op.target) else (op.target, op.args, op.kwargs, op.phase)
            twin = self.first.setdefault(key, op.name) if key else op.name
            if twin != op.name:
                self.same.update((Ref(op.name, i), Ref(twin, i)) for i in range(len(op.outputs)))
                return
        self.ops[op.name] = op

    def _renamed(self, op: Op) -> Op:
        return op.reading(lambda ref: self.same.get(ref, ref)) if any(r in self.same for r in op.refs) else op


Fold = Callable[[Op, _State], "Op | Ref"]


def _identity(op: Op, state: _State) -> Op | Ref:
    return op.args[0]


def _clone(op: Op, state: _State) -> Op | Ref:
    """A copy matters only for its memory layout, or where the caller gets it and could write into it."""
    keeps_layout = dict(op.kwargs).get("memory_format") in (None, torch.preserve_format)
    return op if not keeps_layout or Ref(op.name) in state.returned else op.args[0]


def _cast(op: Op, state: _State) -> Op | Ref:
    kwargs = dict(op.kwargs)
    same = kwargs.pop("dtype", op.outputs[0].dtype) == state.meta(op.args[0]).dtype
    kwargs.pop("non_blocking", None)
    copies = any(v is not None for v in kwargs.values()) or Ref(op.name) in state.returned
    return op.args[0] if same and not copies else op


def _view(op: Op, state: _State) -> Op | Ref:
    """view(view(x)) skips the middle one when nothing else reads it; a view to the same shape is x.
    Sizes become explicit (no -1), and `_unsafe_view`, which differs for autograd only, becomes `view`."""
    x, shape = op.args[0], op.outputs[0].shape
    inner = state.maker(x, aten.view.default)
    if inner is not None and (state.uses.get(x, 0) == 1 or state.meta(inner.args[0]).shape == shape):
        x = inner.args[0]
    if state.meta(x).shape == shape:
        return x
    same = op.args == (x, shape) and op.target is aten.view.default
    return op if same else replace(op, target=aten.view.default, args=(x, shape))


def _same_shape(op: Op, state: _State) -> Op | Ref:
    return op.args[0] if state.meta(op.args[0]).shape == op.outputs[0].shape else op


def _t(op: Op, state: _State) -> Op | Ref:
    inner = state.maker(op.args[0], aten.t.default)
    return inner.args[0] if inner is not None else op


def _transpose(op: Op, state: _State) -> Op | Ref:
    rank = len(op.outputs[0].shape)
    inner = state.maker(op.args[0], aten.transpose.int)
    pair = {d % rank for d in op.args[1:]} if rank else set()
    if len(pair) < 2:
        return op.args[0]
    return inner.args[0] if inner is not None and {d % rank for d in inner.args[1:]} == pair else op


def _conjugate(op: Op, state: _State) -> Op | Ref:
    inner = state.maker(op.args[0], aten.conj_physical.default)
    return inner.args[0] if inner is not None and inner.phase == op.phase else op


def _permute(op: Op, state: _State) -> Op | Ref:
    x, rank = op.args[0], len(op.outputs[0].shape)
    order = tuple(d % rank for d in op.args[1])
    inner = state.maker(x, aten.permute.default)
    if inner is not None and state.uses.get(x, 0) == 1 or inner is not None and _undoes(order, inner.args[1]):
        x, order = inner.args[0], tuple(inner.args[1][d] % rank for d in order)
    if order == tuple(range(rank)):
        return x
    return op if op.args == (x, order) else replace(op, args=(x, order))


def _undoes(order: tuple[int, ...], inner: tuple[int, ...]) -> bool:
    return all(inner[d] % len(order) == i for i, d in enumerate(order))


def _power(op: Op, state: _State) -> Op | Ref:
    return op.args[0] if op.args[1] == 1 and state.meta(op.args[0]).dtype == op.outputs[0].dtype else op


def _batch_norm_backward(op: Op, state: _State) -> Op | Ref:
    """In training it takes the running statistics and never reads them: nobody should gather them for it."""
    running, train = op.args[3:5], op.args[7]
    if not train or running == (None, None):
        return op
    return replace(op, args=(*op.args[:3], None, None, *op.args[5:]))


def _copy(op: Op, state: _State) -> Op | Ref:
    """What is overwritten as a whole does not matter: autograd copies gradients into memory of its own, batch norm and
    poolings into another layout."""
    x, out = op.args[1], op.outputs[0]
    if state.meta(x) != out or Ref(op.name) in state.returned:
        return op
    return x


def _strided(op: Op, state: _State) -> Op | Ref:
    """Memory read in its order is a view; average pooling to one pixel reads its result so. The trace has made the tensor
    contiguous before."""
    x, size, stride, *offset = op.args
    if offset not in ([], [0], [None]) or not _in_order(size, stride, state.meta(x).numel):
        return op
    return _view(replace(op, target=aten.view.default, args=(x, size)), state)


def _strided_scatter(op: Op, state: _State) -> Op | Ref:
    """The way back, where all is overwritten."""
    x, src, size, stride, *offset = op.args
    if offset not in ([], [0], [None]) or not _in_order(size, stride, state.meta(x).numel) or state.meta(src).dtype != op.outputs[0].dtype:
        return op
    return _view(replace(op, target=aten.view.default, args=(src, op.outputs[0].shape)), state)


def _filled(op: Op, state: _State) -> Op | Ref:
    """An empty tensor that is filled piece by piece along one dim: the pieces put together."""
    at: Op | None = op
    out = op.outputs[0]
    pieces: dict[int, Any] = {}
    dims: set[int] = set()
    while at is not None and at.target is aten.slice_scatter.default:
        into, piece, dim, start, _, step = (*at.args, *(0, None, None, 1)[len(at.args) - 2:])
        start = start or 0
        if step != 1 or start in pieces or state.meta(piece).dtype != out.dtype:
            return op
        pieces[start] = piece
        dims.add(dim % out.ndim)
        at = state.maker(into, aten.slice_scatter.default, *EMPTY)
    dim, end = dims.pop(), 0
    for start in sorted(pieces):
        if start != end:
            return op
        end += state.meta(pieces[start]).shape[dim]
    if at is None or dims or end != out.shape[dim]:
        return op
    return replace(op, target=aten.cat.default, args=(tuple(pieces[start] for start in sorted(pieces)), dim), kwargs=())


def _in_order(size: tuple[int, ...], stride: tuple[int, ...], numel: int) -> bool:
    """Whether a strided view is all of a contiguous tensor of `numel` elements, in order."""
    seen = 1
    for n, step in zip(reversed(size), reversed(stride), strict=True):
        if n != 1 and step != seen:
            return False
        seen *= n
    return seen == numel


# A value of one phase replaces one of the other only where both are the same memory (views, aliases), so no
# fold makes a tensor live longer. Equal ops are shared within a phase only: sharing across phases would save a
# value that the model recomputes.
FOLDS: Mapping[Any, Fold] = {
    aten.detach.default: _identity,
    aten.alias.default: _identity,
    aten.lift_fresh.default: _identity,
    aten.clone.default: _clone,
    aten._to_copy.default: _cast,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.expand.default: _same_shape,
    aten.slice.Tensor: _same_shape,
    aten.t.default: _t,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.conj_physical.default: _conjugate,
    aten.pow.Tensor_Scalar: _power,
    aten.copy.default: _copy,
    aten.slice_scatter.default: _filled,
    aten.as_strided.default: _strided,
    aten.as_strided_scatter.default: _strided_scatter,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
}


def _without_dead(graph: Graph) -> Graph:
    """Drop ops that no output needs; parameters that become unused are listed in `unused`. One that is written is not: its new value lies as it."""
    live: set[str] = set()
    written = graph.outputs(Role.MUTATION)
    for op in reversed(graph.ops):
        if op.kind in ("output", "input", "tangent") or op.name in live or op.kind == "param" and op.target in written:
            live.add(op.name)
            live.update(r.op for r in op.refs)
    unused = tuple(op.target for op in graph.of_kind("param") if op.name not in live)
    return replace(graph, ops=tuple(op for op in graph.ops if op.name in live), unused=graph.unused + unused)
