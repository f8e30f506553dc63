"""Which dims of parameters are padded on a mesh, and the program with them: what planning, compiling and verifying use."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from autoshard.base.graph import Graph, Op, Ref, TensorMeta
from autoshard.base.mesh import Mesh
from autoshard.base.roles import AS_STORED
from autoshard.padding import where_read
from autoshard.padding.travel import attention, classes, moves, norms, pointwise, products, reductions
from autoshard.padding.values import Source, next_multiple
from autoshard.padding.walk import Travel, Walk
from autoshard.program.calling import Traced
from autoshard.rules.factors import factor_graph
from autoshard.rules.part_dims import with_parts

MOST_WASTE = 0.125
"""Of what a dim has, the largest part that its pad may be: the pad is computed on, too."""
WEIGHTS, ALL = "weights", "all"
"""What is padded: dims of weights as they are stored, where pads are small; or all of them, heads and rows of the batch, whatever their pads cost."""
TABLES = (moves, products, classes, reductions, attention, norms, pointwise)


def padded(traced: Traced, mesh: Mesh, stored: Mapping[str, TensorMeta] | None = None, pad: str = WEIGHTS) -> Traced:
    """The program with dims of parameters padded that divide over no axis of the mesh, and, if `pad` is ALL, with attention heads and rows of
    inputs too; the same one where there are none. `stored`: parameters that lie on ranks already, which are padded as they are there."""
    graph = traced.graph
    sources = _wanted(graph, mesh, stored, length_on if pad == WEIGHTS else partial(where_read.longer_on, last=True))
    if not sources and pad != ALL:
        return traced
    plain = without_factors(graph)
    read = where_read.groups(plain, mesh) if pad == ALL else []
    while sources or read:
        where = {source: n for group in read for source, n in group.items()}
        of_heads = {(name.removeprefix("param:"), d) for name, d in where if name.startswith("param:")}
        walk = Walk(plain, {s: n for s, n in sources.items() if s not in of_heads}, travel_of, where)
        found = walk.run()
        kept = [group for group in read if not walk.spilled & group.keys()]
        if len(kept) == len(read) and (stored or not walk.spilled & sources.keys()):
            with_dims = with_parts(factor_graph(found), stored)
            calling = replace(traced.calling, constants={**traced.calling.constants, **walk.constants})
            return replace(traced, graph=marked(with_dims), calling=calling)
        read = kept
        sources = sources if stored else {s: n for s, n in sources.items() if s not in walk.spilled}
    return traced


def travel_of(target: Any) -> Travel | None:
    for table in TABLES:
        if target in table.TRAVELS:
            return table.TRAVELS[target]
    return pointwise.elementwise if pointwise.is_pointwise(target) else None


def _wanted(graph: Graph, mesh: Mesh, stored: Mapping[str, TensorMeta] | None, length_of: Callable[[Mesh, int], int | None]) -> dict[Source, int]:
    """Dims of weights that do not divide, with the length that they get, if any; of vectors those as long."""
    found: dict[Source, int] = {}
    params = [(op.target, op.outputs[0]) for op in graph.of_kind("param") if op.outputs[0] is not None]
    if any(meta.unpadded for _, meta in params):
        return {}
    if stored:
        return {(name, d): stored[name].shape[d] for name, meta in params if name in stored and stored[name].unpadded
                for d, n in enumerate(meta.shape) if stored[name].shape[d] != n}
    lengths: dict[int, int] = {}
    for _, meta in (p for p in params if len(p[1].shape) > 1):
        for d, n in enumerate(meta.shape):
            if meta.parts_of(d) == 1 and (length := length_of(mesh, n)) is not None:
                lengths[n] = length
    for name, meta in params:
        found |= {(name, d): lengths[n] for d, n in enumerate(meta.shape) if n in lengths and meta.parts_of(d) == 1}
    return found


def length_on(mesh: Mesh, n: int) -> int | None:
    """How long a dim of `n` becomes: as the last axis splits it. None for one that some axis divides, whose layouts would be lost, or whose pad
    would be too large a part of it."""
    sizes = [size for size in mesh.sizes if size > 1]
    if not sizes or any(n % size == 0 for size in sizes):
        return None
    return next_multiple(n, sizes[-1], MOST_WASTE)


def without_factors(graph: Graph) -> Graph:
    """With tensor dims as its logical dims."""
    return replace(graph, ops=tuple(replace(op, outputs=tuple(m and TensorMeta(m.shape, m.dtype) for m in op.outputs)) for op in graph.ops))


def marked(graph: Graph) -> Graph:
    """With the true shapes of parameters at their gradients and new values."""
    true = {op.target: op.outputs[0].unpadded for op in graph.of_kind("param") if op.outputs[0] and op.outputs[0].unpadded}
    given = [item for role in AS_STORED for item in graph.outputs(role).items()]
    marks: dict[Ref, tuple[int, ...]] = {op.refs[0]: true[name] for name, op in given if op.refs and name in true}

    def with_mark(op: Op) -> Op:
        if not any(Ref(op.name, i) in marks for i in range(len(op.outputs))):
            return op
        return replace(op, outputs=tuple(m and replace(m, unpadded=marks.get(Ref(op.name, i), ())) for i, m in enumerate(op.outputs)))

    return replace(graph, ops=tuple(map(with_mark, graph.ops)))


