"""Where a value lies, and how long: what memory rows and copy nodes ask of a graph."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.base.graph import EARLY, Graph, Ref, TensorMeta
from autoshard.base.spec import NOWHERE, Spec, beside
from autoshard.cost.memory import value_bytes
from autoshard.recompute.rewrite import is_source
from autoshard.rules import registry
from autoshard.space.cost_table import CostTable


def local_bytes(table: CostTable, ref: Ref, spec: Spec) -> float:
    """Bytes of a value on one rank."""
    return 0.0 if NOWHERE in spec else float(value_bytes(table.graph.meta(ref), spec, table.mesh))


def is_saved(graph: Graph, ref: Ref) -> bool:
    """Whether forward makes this value and backward reads it; parameters, buffers and inputs are there anyway. What one part of a split backward
    makes for the other is not there yet when forward ends."""
    readers = (graph.op(name) for name, _ in graph.users.get(ref, ()))
    made = graph.window_of(ref.op)
    return (graph.op(ref.op).phase in EARLY and graph.op(storage_root(graph, ref).op).kind == "call"
            and any(graph.window_of(op.name) > made and not is_source(op) for op in readers))


def storage_root(graph: Graph, ref: Ref) -> Ref:
    """The value whose buffer `ref` is a view of."""
    op = graph.op(ref.op)
    while registry.is_view(op) and len(op.refs) == 1:
        ref = op.refs[0]
        op = graph.op(ref.op)
    return ref


def equality(source: TensorMeta, output: TensorMeta, src: Sequence[Spec], dst: Sequence[Spec]) -> np.ndarray:
    """0 where the two lie alike, else inf."""
    here, there = ([beside(meta, other, s) for s in specs] for meta, other, specs in ((source, output, src), (output, source, dst)))
    return np.where(np.array([[s is not None and s == d for d in there] for s in here]), 0.0, np.inf)
