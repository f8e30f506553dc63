"""Dims made of parts: which dims are a row of equal parts (q|k|v, gate|up), so that each part is split and not the row.

Cut into ranks as it stands, a fused projection would leave q on the first rank and v on the last. A dim that the model itself takes
apart (split, chunk, slices, a view with the parts as a dim that is then unbound) gets two logical dims instead: the number of
parts, which is never split, and what one part has (`TensorMeta.part_dims`). A shard of it is the rank's share of every part.

Where a rule lets one shard pass from a dim to another, both have the same parts. So the dims that share parts are found by
walking along rules' rows from where the parts are seen; they become dims made of parts together, if a weight is among them and
nothing that has its layout from outside (an input, a buffer, an output).
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from autoshard.base.graph import Call, Graph, Op, Ref, TensorMeta
from autoshard.base.roles import Role
from autoshard.experts.ops import EXPERTS, EXPERTS_BACKWARD
from autoshard.rules import registry

aten = torch.ops.aten
MOST_PARTS = 8
"""More are no parts: positions of a sequence, experts, heads."""
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default, aten.chunk.default)
UP = 3
"""Of a layer of experts the matrices with gate and up in one."""
PICKS = (aten.unbind.int, aten.select.int)

Dim = tuple[Ref, int]
"""A logical dim of a value."""
Links = dict[tuple[int, int], set[tuple[int, int]]]


def with_parts(graph: Graph, stored: Mapping[str, TensorMeta] | None = None) -> Graph:
    """The graph with the parts of its dims. `stored`: parameters that lie on ranks already, which keep the parts that they have there."""
    graph, known = without_parts(graph), stored or {}
    found: dict[Dim, int] = {}
    walk = _Walk(graph, known)
    for start, count in _held(graph, known):
        dims = walk.dims_like(start, count) or {start, *walk.tied(start)}  # where others cannot follow, they read it whole
        found |= dict.fromkeys(dims - found.keys(), count)
    for start, count in _seen(graph):
        dims = set() if start in found else walk.dims_like(start, count)
        if not dims & found.keys():
            found |= dict.fromkeys(dims, count)
    chosen: dict[str, dict[tuple[int, int], int]] = defaultdict(dict)
    for (ref, dim), count in found.items():
        chosen[ref.op][ref.index, dim] = count
    return replace(graph, ops=tuple(_refined(op, chosen[op.name]) if op.name in chosen else op for op in graph.ops))


def without_parts(graph: Graph) -> Graph:
    """The graph in which such dims are plain ones."""
    return replace(graph, ops=tuple(op if not any(m and m.part_dims for m in op.outputs) else
                                    replace(op, outputs=tuple(m and _plain(m) for m in op.outputs)) for op in graph.ops))


def _plain(meta: TensorMeta) -> TensorMeta:
    factors, at = [], 0
    for f in meta.factors:
        here = [i - at for i in meta.part_dims if at <= i < at + len(f)]
        at += len(f)
        for i in here:
            f = (*f[:i], f[i] * f[i + 1], *f[i + 2:])
        factors.append(f)
    return replace(meta, factors=tuple(factors), part_dims=())


def _refined(op: Op, counts: Mapping[tuple[int, int], int]) -> Op:
    """The op with (output, logical dim) made of so many parts."""
    def made(index: int, meta: TensorMeta | None) -> TensorMeta | None:
        if meta is None:
            return None
        factors, parts, old, new = [], [], 0, 0
        for f in meta.factors:
            sizes: list[int] = []
            for n in f:
                count = counts.get((index, old), n)
                if count != n:
                    parts.append(new + len(sizes))
                    sizes.append(count)
                    n //= count
                sizes.append(n)
                old += 1
            new += len(sizes)
            factors.append(tuple(sizes))
        return replace(meta, factors=tuple(factors), part_dims=tuple(parts))

    return replace(op, outputs=tuple(made(i, m) for i, m in enumerate(op.outputs)))


# ---- where parts are seen

def _held(graph: Graph, stored: Mapping[str, TensorMeta]) -> Iterator[tuple[Dim, int]]:
    for op in graph.of_kind("param"):
        meta = stored.get(op.target)
        for dim in range(len(meta.shape)) if meta is not None else ():
            if meta is not None and meta.parts_of(dim) > 1:
                yield (Ref(op.name), dim), meta.parts_of(dim)


def _seen(graph: Graph) -> Iterator[tuple[Dim, int]]:
    """(dim, number of parts) wherever forward takes a dim apart."""
    slices: dict[tuple[Dim, int], set[int]] = defaultdict(set)
    for op in graph.of_kind("call"):
        if op.phase == "forward" and op.target is EXPERTS and graph.calls[op.name].argument("gated"):
            yield (op.refs[UP], 1), 2
        if op.phase != "forward" or op.target not in (*SPLITS, *PICKS, aten.slice.Tensor):
            continue
        call = graph.calls[op.name]
        meta, at = call.inputs[0], call.argument("dim") % max(len(call.inputs[0].shape), 1)
        if not meta.shape or len(meta.logical_dims(at)) > 1:
            continue
        where, n = (op.refs[0], meta.logical_dims(at)[0]), meta.shape[at]
        if op.target in PICKS and 1 < n <= MOST_PARTS:
            yield where, n
        elif op.target in SPLITS and 1 < len(op.outputs) <= MOST_PARTS and len({m and m.shape[at] for m in op.outputs}) == 1:
            yield where, len(op.outputs)
        elif op.target is aten.slice.Tensor and (call.argument("step") or 1) == 1:
            length, start = call.output().shape[at], call.argument("start") or 0
            if 0 < length < n <= MOST_PARTS * length and n % length == 0 and start % length == 0:
                slices[where, n // length].add(start % n)
    yield from ((where, count) for (where, count), starts in slices.items() if len(starts) > 1)


# ---- which dims have the same parts

@dataclass
class _Walk:
    """Along the rows of rules. `links` of calls that were met; `refused`: (dim, number of parts) from where there is no way."""

    graph: Graph
    stored: Mapping[str, TensorMeta]
    refused: set[tuple[Dim, int]] = field(default_factory=set)
    links: dict[Call, Links] = field(default_factory=dict)

    def dims_like(self, start: Dim, count: int) -> set[Dim]:
        """All dims that have to consist of `count` parts if `start` does, dims that are no more than that number left out;
        none where one of them cannot, or no weight is among them."""
        seen = {start}
        possible = self._grow(seen, count)
        parted = {(ref, dim) for ref, dim in seen if self.graph.meta(ref).logical_shape[dim] > count}
        if possible and any(self.graph.op(ref.op).kind == "param" and len(self.graph.meta(ref).shape) > 1 for ref, _ in parted):
            return parted
        self.refused |= {(dim, count) for dim in seen}
        return set()

    def _grow(self, seen: set[Dim], count: int) -> bool:
        """Add the dims that go with those in `seen`; False as soon as there is one that cannot."""
        waiting = list(seen)
        while waiting:
            ref, dim = waiting.pop()
            size = self.graph.meta(ref).logical_shape[dim]
            if size % count or ((ref, dim), count) in self.refused or not self._is_free(ref, dim, count if size > count else 1):
                return False
            for other in self._neighbours(ref, dim):
                if other is None:
                    return False
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)
        return True

    def _is_free(self, ref: Ref, dim: int, count: int) -> bool:
        op = self.graph.op(ref.op)
        if op.kind == "param" and op.target in self.stored:
            return self.stored[op.target].parts_of(dim) == count
        outside = (self.graph.op(name) for name, _ in self.graph.users.get(ref, ()))
        return op.kind in ("param", "call") and not any(o.kind == "output" and o.target.role is not Role.GRADIENT for o in outside)

    def _neighbours(self, ref: Ref, dim: int) -> Iterator[Dim | None]:
        """Dims that a shard of this one passes to or comes from; None for an op that looks at groups within the dim."""
        yield from self.tied((ref, dim))
        ends = [(self.graph.op(name), i) for name, i in self.graph.users.get(ref, ())]
        maker = self.graph.op(ref.op)
        for op, slot in (*ends, (maker, len(maker.refs) + ref.index)):
            if op.kind != "call":
                continue
            for other, d in self._links(self.graph.calls[op.name]).get((slot, dim), ()):
                yield None if _has_groups(self.graph.calls[op.name]) else (
                    (op.refs[other], d) if other < len(op.refs) else (Ref(op.name, other - len(op.refs)), d))

    def tied(self, of: Dim) -> Iterator[Dim]:
        """A parameter's dim and that of its gradient, which a layer of experts makes for frozen ones too."""
        ref, dim = of
        gradients, op = self.graph.outputs(Role.GRADIENT), self.graph.op(ref.op)
        if op.kind == "param" and op.target in gradients:
            yield gradients[op.target].refs[0], dim
        for name, slot in self.graph.users.get(ref, ()):
            user = self.graph.op(name)
            if user.kind == "output" and user.target.role is Role.GRADIENT:
                yield Ref(self.graph.ties[name]), dim
            if user.target is EXPERTS_BACKWARD and slot == UP + 1:  # the gradient that comes in is before it
                yield Ref(name, 2), dim

    def _links(self, call: Call) -> Links:
        if call not in self.links:
            self.links[call] = links(call)
        return self.links[call]


def links(call: Call) -> Links:
    """(tensor, dim) -> those that one row shards with it; tensors are inputs, then outputs. A dim that goes with several of one
    tensor (any shard of `new_zeros`) goes with none."""
    pairs: dict[tuple[int, int], dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for row in registry.rows(call):
        placed = [(i, p) for i, p in enumerate((*row.inputs, *row.outputs)) if p >= 0]
        for a, b in ((a, b) for a in placed for b in placed if a is not b):
            pairs[a][b[0]].add(b[1])
    return {a: {(i, min(ds)) for i, ds in others.items() if len(ds) == 1} for a, others in pairs.items()}


def _has_groups(call: Call) -> bool:
    """Whether the op takes runs of the dim together (grouped convolution, group norm), which shares of parts would cut."""
    names = [a.name for a in call.target._schema.arguments] if hasattr(call.target, "_schema") else []
    found = [call.argument(name) for name in ("groups", "group", "num_groups") if name in names]
    return any(isinstance(n, int) and n > 1 for n in found)
