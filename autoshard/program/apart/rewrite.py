"""A projection whose features are parts of unequal length (q|k|v of grouped heads) becomes one product for each part.

No shard of such a dim is of use: the first rank would have some of q and the last one v. As products by row blocks of the weight, each part is
split by itself, or stays whole where its heads are too few. The weight is one parameter as before: slices of it are ops of the program, so the
search prices what moves to where the heads are (an all-to-all of the weight, if it is stored split along its other dim), and its gradient is put
together from those of the parts.

Ops are distributed over concatenations: of a value that is one only the parts are computed (`Parts`), until something takes it apart, sums over
it, or reads it whole. Results are equal up to the order of a sum.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autoshard.base.graph import FORWARD, Graph, Op, Ref, TensorMeta
from autoshard.program.apart.parts import RESHAPES, TURNS, Lengths, Parts, ranges, reshaped, starts_of, turned
from autoshard.program.apart.seen import unequal

aten = torch.ops.aten


def with_parts_apart(graph: Graph) -> Graph:
    """An equal graph without projections of unequal parts."""
    found = unequal(graph)
    if not found:
        return graph
    state = _Rewriting(found, set(found.values()))
    for op in graph.ops:
        state.visit(op)
    return replace(graph, ops=tuple(state.ops.values()))


@dataclass
class _Rewriting:
    """`products`: those to take apart; `ops`: what was made so far; `pending`: ops that are not made unless something reads their value whole."""

    products: Mapping[str, Lengths]
    lengths: set[Lengths]
    ops: dict[str, Op] = field(default_factory=dict)
    known: dict[Ref, Parts] = field(default_factory=dict)
    pending: dict[str, Op] = field(default_factory=dict)
    same: dict[Ref, Ref] = field(default_factory=dict)

    def meta(self, ref: Ref) -> TensorMeta:
        op = self.ops.get(ref.op) or self.pending[ref.op]
        found = op.outputs[ref.index]
        assert found is not None, f"{ref.op} makes no output {ref.index}"
        return found

    def visit(self, op: Op) -> None:
        op = op.reading(lambda ref: self.same.get(ref, ref))
        apart = APART.get(op.target) if op.kind == "call" else None
        made = apart(self, op) if apart is not None and not _scaled(op) else None
        if made is not None:
            self.known[Ref(op.name)] = made
            self.pending[op.name] = op
        elif not self._picked(op) and not self._summed(op):
            self.ops[op.name] = op.reading(self.whole)

    def emit(self, like: Op, target: Any, args: tuple[Any, ...], shape: tuple[int, ...], name: str = "") -> Ref:
        """A new op beside `like`, with an output of the same dtype."""
        meta = like.outputs[0]
        assert meta is not None, like.name
        name = name or next(n for i in range(len(self.ops) + 1) if (n := f"{like.name}_part{i}") not in self.ops)
        self.ops[name] = replace(like, name=name, target=target, args=args, kwargs=(), outputs=(TensorMeta(shape, meta.dtype),))
        return Ref(name)

    def each(self, op: Op, dim: int, parts: Parts, make: Callable[[Ref, tuple[int, ...]], tuple[Any, tuple[Any, ...]]],
             lengths: Lengths | None = None) -> Parts:
        """`op` part by part: `make` gives target and arguments for a part, and the shape of what it makes."""
        meta, lengths, out = op.outputs[0], lengths or parts.lengths, []
        assert meta is not None, op.name
        for ref, length in zip(parts.refs, lengths, strict=True):
            shape = (*meta.shape[:dim], length, *meta.shape[dim + 1:])
            out.append(None if ref is None else self.emit(op, *make(ref, shape), shape))
        return Parts(dim, lengths, tuple(out))

    def whole(self, ref: Ref) -> Ref:
        """The value itself. One that is known by its parts only is put together, under the name that it had."""
        if ref.op in self.pending:
            op, parts = self.pending.pop(ref.op), self.known[ref]
            shape = self.known_shape(op)
            refs = tuple(r or self.emit(op, aten.new_zeros.default, (next(filter(None, parts.refs)), (*shape[:parts.dim], n, *shape[parts.dim + 1:])),
                                        (*shape[:parts.dim], n, *shape[parts.dim + 1:])) for r, n in zip(parts.refs, parts.lengths, strict=True))
            self.emit(op, aten.cat.default, (refs, parts.dim), shape, op.name)
        return ref

    @staticmethod
    def known_shape(op: Op) -> tuple[int, ...]:
        assert op.outputs[0] is not None, op.name
        return op.outputs[0].shape

    def parts(self, ref: Ref, dim: int, lengths: Lengths, like: Op) -> Parts:
        """Any value by its parts along a dim: those known, turned as it is turned, or slices."""
        found = self.known.get(ref)
        if found is not None and (found.dim, found.lengths) == (dim, lengths):
            return found
        op, meta = self.ops.get(ref.op), self.meta(ref)
        if op is not None and op.kind == "call" and op.target in TURNS:
            before = next(d for d in range(len(meta.shape)) if turned(op, d, len(meta.shape)) == dim)
            here = replace(op, phase=like.phase)
            made = self.each(here, dim, self.parts(op.args[0], before, lengths, like), lambda r, _: (op.target, (r, *op.args[1:])))
        else:
            ref = self.whole(ref)
            made = Parts(dim, lengths, tuple(self.emit(replace(like, outputs=(meta,)), aten.slice.Tensor, (ref, dim, start, start + n),
                                                       (*meta.shape[:dim], n, *meta.shape[dim + 1:]))
                                             for start, n in zip(starts_of(lengths), lengths, strict=True)))
        self.known[ref] = made
        return made

    def _picked(self, op: Op) -> bool:
        """Whether `op` splits or slices a value into its parts: they are there."""
        parts = self.known.get(op.refs[0]) if op.kind == "call" and op.refs and op.refs[0].op in self.pending else None
        taken = parts and ranges(op, self.meta(op.refs[0]).shape, parts.dim)
        if not parts or not taken:
            return False
        there = dict(zip(zip(starts_of(parts.lengths), parts.lengths, strict=True), parts.refs, strict=True))
        refs = [there.get(t) for t in taken]
        if None in refs:
            return False
        self.same |= {Ref(op.name, i): r for i, r in enumerate(refs) if r is not None}
        return True

    def _summed(self, op: Op) -> bool:
        """Whether `op` contracts a dim that consists of parts: a sum of products."""
        if op.target is not aten.mm.default or (parts := self.known.get(op.args[0])) is None or parts.dim != 1 or op.args[0].op not in self.pending:
            return False
        others = self.parts(op.args[1], 0, parts.lengths, op)
        pairs = [(a, b) for a, b in zip(parts.refs, others.refs, strict=True) if a is not None and b is not None]
        if not pairs:
            return False
        shape = self.known_shape(op)
        made = [self.emit(op, aten.mm.default, pair, shape, op.name if len(pairs) == 1 else "") for pair in pairs]
        total = made[0]
        for i, ref in enumerate(made[1:], 2):
            total = self.emit(op, aten.add.Tensor, (total, ref), shape, op.name if i == len(made) else "")
        return True


def _scaled(op: Op) -> bool:
    """Whether an op of `APART` has options that change what it computes."""
    return bool({k for k, _ in op.kwargs} - {"memory_format", "dtype"})


# ---- ops of which only the parts are computed: what is known of their value, or None

def _pending(state: _Rewriting, ref: Any) -> Parts | None:
    return state.known.get(ref) if isinstance(ref, Ref) and ref.op in state.pending else None


def _product(state: _Rewriting, op: Op) -> Parts | None:
    bias, a, b = (None, *op.args) if op.target is aten.mm.default else op.args
    mine, other = _pending(state, a), _pending(state, b)
    if mine is not None and mine.dim == 0 and bias is None:
        right = state.whole(b)
        return state.each(op, 0, mine, lambda r, _: (op.target, (r, right)))
    lengths = other.lengths if other is not None and other.dim == 1 else state.products.get(op.name)
    if lengths is None or mine is not None or bias is not None and len(state.meta(bias).shape) != 1:
        return None
    weights, left = state.parts(b, 1, lengths, op), state.whole(a)
    if bias is None:
        return state.each(op, 1, weights, lambda r, _: (op.target, (left, r)))
    added = dict(zip(weights.refs, state.parts(bias, 0, lengths, op).refs, strict=True))
    return state.each(op, 1, weights, lambda r, _: (op.target, (added[r], left, r)))


def _reshape(state: _Rewriting, op: Op) -> Parts | None:
    parts, after = _pending(state, op.args[0]), state.known_shape(op)
    found = parts and reshaped(state.meta(op.args[0]).shape, parts.dim, after, parts.lengths)
    if not parts or not found:
        return None
    return state.each(op, found[0], parts, lambda r, shape: (aten.view.default, (r, shape)), found[1])


def _turn(state: _Rewriting, op: Op) -> Parts | None:
    if (parts := _pending(state, op.args[0])) is None:
        return None
    dim = turned(op, parts.dim, len(state.known_shape(op)))
    return state.each(op, dim, parts, lambda r, _: (op.target, (r, *op.args[1:])))


def _clone(state: _Rewriting, op: Op) -> Parts | None:
    return _pending(state, op.args[0])


def _sum(state: _Rewriting, op: Op) -> Parts | None:
    if (parts := _pending(state, op.args[0])) is None or op.kwargs or not op.args[1]:
        return None
    rank = len(state.meta(op.args[0]).shape)
    away = {d % rank for d in op.args[1]}
    if parts.dim in away:
        return None
    dim = parts.dim if len(op.args) > 2 and op.args[2] else parts.dim - sum(d < parts.dim for d in away)
    return state.each(op, dim, parts, lambda r, _: (op.target, (r, *op.args[1:])))


def _add(state: _Rewriting, op: Op) -> Parts | None:
    """Of two values that consist of the same parts, some of them zeros."""
    one, two = (_pending(state, x) for x in op.args)
    if one is None or two is None or (one.dim, one.lengths) != (two.dim, two.lengths):
        return None
    shape = state.known_shape(op)
    if any(state.known_shape(state.pending[x.op]) != shape for x in op.args):
        return None
    refs = [a or b if a is None or b is None else state.emit(op, op.target, (a, b), (*shape[:one.dim], n, *shape[one.dim + 1:]))
            for a, b, n in zip(one.refs, two.refs, one.lengths, strict=True)]
    return replace(one, refs=tuple(refs))


def _joined(state: _Rewriting, op: Op) -> Parts | None:
    """The gradient of a split: a concatenation of parts."""
    refs, dim = op.args[0], (op.args[1] if len(op.args) > 1 else 0) % len(state.known_shape(op))
    lengths = tuple(state.meta(r).shape[dim] for r in refs)
    return Parts(dim, lengths, tuple(map(state.whole, refs))) if op.phase != FORWARD and _scale(state, lengths) else None


def _scattered(state: _Rewriting, op: Op) -> Parts | None:
    """The gradient of a slice: zeros but for one part."""
    x, shape, dim, start, _, step = op.args
    n, dim = state.meta(x).shape[dim], dim % len(shape)
    first = start + shape[dim] if start < 0 else start
    for lengths in state.lengths:
        scale, odd = divmod(sum(lengths), shape[dim])
        if odd or step != 1 or any(length % scale for length in lengths):
            continue
        scaled = tuple(length // scale for length in lengths)
        spans = list(zip(starts_of(scaled), scaled, strict=True))
        if (first, n) in spans:
            at = spans.index((first, n))
            return Parts(dim, scaled, tuple(state.whole(x) if i == at else None for i in range(len(scaled))))
    return None


def _scale(state: _Rewriting, lengths: Lengths) -> bool:
    """Whether parts are those of a projection, possibly counted in heads."""
    return all(lengths) and any(len(lengths) == len(known) and len({(k % n, k // n) for n, k in zip(lengths, known, strict=True)}) == 1
                                and not known[0] % lengths[0] for known in state.lengths)


APART: Mapping[Any, Callable[[_Rewriting, Op], Parts | None]] = {
    **dict.fromkeys((aten.mm.default, aten.addmm.default), _product),
    **dict.fromkeys(RESHAPES, _reshape),
    **dict.fromkeys(TURNS, _turn),
    aten.clone.default: _clone,
    aten.sum.dim_IntList: _sum,
    aten.add.Tensor: _add,
    aten.cat.default: _joined,
    aten.slice_backward.default: _scattered,
}
