"""Factor propagation: which logical dims every tensor has.

A view that merges batch and sequence keeps both as factors of the flat dim, and the rules carry them
through matmuls, elementwise ops and losses until a view splits the dim again. Parameters, buffers, inputs
and tangents are plain.
"""
from __future__ import annotations

from dataclasses import replace

from autoshard.base.graph import Call, Graph, Op, Ref, Slot, TensorMeta, map_args
from autoshard.rules import registry


def factor_graph(graph: Graph) -> Graph:
    """The same graph with `TensorMeta.factors` of every call's outputs as the rules say."""
    metas: dict[str, tuple[TensorMeta | None, ...]] = {}
    ops = []
    for op in graph.ops:
        if op.kind == "call":
            op = _with_factors(op, metas)
        metas[op.name] = op.outputs
        ops.append(op)
    return replace(graph, ops=tuple(ops))


def _with_factors(op: Op, metas: dict[str, tuple[TensorMeta | None, ...]]) -> Op:
    call = call_of(op, metas)
    outputs = tuple(None if m is None or f is None else TensorMeta(m.shape, m.dtype, f)
                    for m, f in zip(op.outputs, registry.factors(call), strict=True))
    return op if outputs == op.outputs else replace(op, outputs=outputs)


def call_of(op: Op, metas: dict[str, tuple[TensorMeta | None, ...]]) -> Call:
    """The name-free view of `op` when the graph is not complete yet."""
    slots = iter(range(len(op.refs)))

    def fill(leaf: object) -> object:
        return Slot(next(slots)) if isinstance(leaf, Ref) else leaf

    args = map_args(fill, op.args)
    kwargs = tuple((k, map_args(fill, v)) for k, v in op.kwargs)
    return Call(op.target, args, kwargs, tuple(_meta(r, metas) for r in op.refs), op.outputs)


def _meta(ref: Ref, metas: dict[str, tuple[TensorMeta | None, ...]]) -> TensorMeta:
    found = metas[ref.op][ref.index]
    assert found is not None, f"{ref.op} makes no output {ref.index}"
    return found
