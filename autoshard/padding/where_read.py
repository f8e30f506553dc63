"""Dims that are padded where they are read, if the user asks for all that can be padded: attention heads, and rows of a batch.

Six heads of four features on four ranks are computed as eight, two on each. The weight has 24 rows, which its ranks store as six each; so it is
an op of the program that makes 32 of them, and the search prices what moves to where the heads are (an all-to-all of the weight, if it is stored
split along the other dim). Inputs come whole, and an op makes six rows of five.

The dims of weights that a head count decides are found by a walk along the rows of rules, from attention. A group of dims is padded together or
not at all."""
from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from autoshard.base.graph import Graph, Op, Ref
from autoshard.base.mesh import Mesh
from autoshard.padding.values import Source, next_multiple
from autoshard.rules.part_dims import Dim, links

aten = torch.ops.aten
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
HEADS = 1
MOST_WASTE = 1.0
"""Of what a dim has, the largest part that its pad may be."""

Group = Mapping[Source, int]
"""Lengths of dims of inputs and parameters, by the names of their ops."""


def groups(graph: Graph, mesh: Mesh) -> list[Group]:
    """What to pad on a mesh: rows of the inputs, and per kind of attention its heads. `graph`: with tensor dims as its logical dims."""
    return [group for group in (_rows(graph, mesh), *_heads(graph, mesh)) if group]


def longer_on(mesh: Mesh, n: int, last: bool) -> int | None:
    """The length at which the last (first) axis divides a dim of `n`. None where one does, where layouts over another would be lost, or the pad
    is too large; and of a dim of one, which has nothing to split, and would no longer broadcast over longer ones."""
    sizes = [size for size in mesh.sizes if size > 1]
    if n == 1 or not sizes or n % (size := sizes[-1 if last else 0]) == 0:
        return None
    length = next_multiple(n, size, MOST_WASTE)
    keeps = length is not None and all(length % other == 0 for other in sizes if n % other == 0)
    return length if keeps else None


def _rows(graph: Graph, mesh: Mesh) -> Group:
    """Dim 0 of all inputs that have as many rows as the first one."""
    inputs = [(op.name, op.outputs[0].shape) for op in graph.of_kind("input") if op.outputs[0] is not None and op.outputs[0].shape]
    rows = inputs[0][1][0] if inputs else 1
    length = longer_on(mesh, rows, last=False)
    return {} if length is None else {(name, 0): length for name, shape in inputs if shape[0] == rows}


def _heads(graph: Graph, mesh: Mesh) -> Iterator[Group]:
    seen: set[Dim] = set()
    for op in graph.of_kind("call"):
        if op.target is not ATTENTION or op.phase != "forward":
            continue
        query, key, value = op.refs[:3]
        heads, shared = (graph.meta(ref).shape[HEADS] for ref in (query, key))
        if shared > 1 and heads % shared:
            continue
        starts = [(query, HEADS), (key, HEADS), (value, HEADS)][:3 if shared > 1 else 1]
        old = shared if shared > 1 else heads
        new = longer_on(mesh, old, last=True)
        if new is None or shared > 1 and heads % mesh.sizes[-1] == 0:
            continue
        dims = set().union(*(_like(graph, start) for start in starts))
        if not dims & seen:
            yield {(ref.op, d): n * new // old for ref, d in sorted(dims, key=str)
                   if graph.op(ref.op).kind == "param" and (n := graph.meta(ref).shape[d]) % old == 0}
        seen |= dims


def _like(graph: Graph, start: Dim) -> set[Dim]:
    """The dims that are split together with `start`."""
    seen, waiting = {start}, [start]
    while waiting:
        ref, dim = waiting.pop()
        for op, slot in _ends(graph, ref):
            for other, d in links(graph.calls[op.name]).get((slot, dim), ()):
                found = (op.refs[other], d) if other < len(op.refs) else (Ref(op.name, other - len(op.refs)), d)
                if found not in seen:
                    seen.add(found)
                    waiting.append(found)
    return seen


def _ends(graph: Graph, ref: Ref) -> Iterator[tuple[Op, int]]:
    """Calls of forward that read or make a value, and which of their tensors it is."""
    maker = graph.op(ref.op)
    ends = [*((graph.op(name), i) for name, i in graph.users.get(ref, ())), (maker, len(maker.refs) + ref.index)]
    return ((op, slot) for op, slot in ends if op.kind == "call" and op.phase == "forward")
