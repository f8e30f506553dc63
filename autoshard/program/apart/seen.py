"""Which products make parts of unequal length that are read as heads."""
from __future__ import annotations

import torch

from autoshard.base.graph import Graph, Op, Ref
from autoshard.program.apart.parts import RESHAPES, TURNS, Lengths, ranges, reshaped

aten = torch.ops.aten
MOST_PARTS = 8
WEIGHT_AT = {aten.mm.default: 1, aten.addmm.default: 2}


def unequal(graph: Graph) -> dict[str, Lengths]:
    """Products by a parameter, by name, with the lengths of the parts that its features are taken apart into."""
    found = {op.name: _lengths(graph, op) for op in graph.of_kind("call") if op.target in WEIGHT_AT and _by_param(graph, op)}
    return {name: lengths for name, lengths in found.items() if lengths is not None}


def _by_param(graph: Graph, op: Op) -> bool:
    made = graph.op(op.args[WEIGHT_AT[op.target]].op)
    while made.kind == "call" and made.target in (*TURNS, aten._to_copy.default):
        made = graph.op(made.refs[0].op)
    return made.kind == "param"


def _lengths(graph: Graph, op: Op) -> Lengths | None:
    ref = last = Ref(op.name)
    n = graph.meta(ref).shape[-1]
    while len(users := graph.users.get(last, ())) == 1 and (reader := graph.op(users[0][0])).target in RESHAPES:
        last = Ref(reader.name)
    shape = graph.meta(last).shape
    found = reshaped(graph.meta(ref).shape, 1, shape, (n,))
    pieces = found and _pieces([graph.op(name) for name, _ in users], shape, found[0])
    if not found or not pieces or not _are_heads(graph, pieces, found[0]):
        return None
    return tuple(length * n // shape[found[0]] for _, length, _ in pieces)


Piece = tuple[int, int, Ref]
"""Start, length, and what it becomes."""


def _pieces(readers: list[Op], shape: tuple[int, ...], dim: int) -> list[Piece] | None:
    """The parts in order, where readers take all of a dim, each part once, and they are not equally long."""
    taken: set[Piece] = set()
    for reader in readers:
        found = ranges(reader, shape, dim) if reader.kind == "call" else None
        if found is None:
            return None
        taken |= {(start, length, Ref(reader.name, i)) for i, (start, length) in enumerate(found)}
    pieces = sorted(taken, key=lambda p: p[:2])
    ends = [0, *(start + length for start, length, _ in pieces)]
    tiles = ends[-1] == shape[dim] and all(start == end for (start, _, _), end in zip(pieces, ends, strict=False))
    lengths = {length for _, length, _ in pieces}
    return pieces if tiles and 1 < len(pieces) <= MOST_PARTS and len(lengths) > 1 and min(lengths) > 0 else None


def _are_heads(graph: Graph, pieces: list[Piece], dim: int) -> bool:
    """Whether the longest part is read as heads, and every other part has several heads of the same size, whose number divides those."""
    _, longest, ref = max(pieces, key=lambda p: p[1])
    least, shape = min(length for _, length, _ in pieces), graph.meta(ref).shape
    if dim < len(shape) - 1:
        sizes = {1}
    else:
        views = [graph.op(name) for name, _ in graph.users.get(ref, ())]
        sizes = {v.outputs[0].shape[-1] for v in views if v.target is aten.view.default and v.outputs[0] is not None} - {1}
    return longest % least == 0 and any(least > size and all(length % size == 0 for _, length, _ in pieces) for size in sizes)
