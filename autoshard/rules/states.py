"""State: buffers that an inference program reads and writes back, such as the keys and values of earlier tokens.

A state is placed like an activation, and what is written back lies as it did. Training keeps its buffers whole, and so do statistics of
batch norms. A write that replaces rows of a state, which nobody reads in its old form afterwards, is done in place: the other rows are
neither read nor written.
"""
from __future__ import annotations

import torch

from autoshard.base.graph import Graph, Op, Ref
from autoshard.base.roles import Role
from autoshard.rules import registry
from autoshard.rules.family import Family

aten = torch.ops.aten
ROW_WRITES = {
    aten.index_copy.default: "source", aten.index_put.default: "values", aten._unsafe_index_put.default: "values",
    aten.scatter.src: "src", aten.slice_scatter.default: "src", aten.select_scatter.default: "src",
}
"""Op that replaces rows of its first argument -> the argument that holds the new ones."""


def states(graph: Graph) -> frozenset[str]:
    """Names of the buffer ops whose placement is chosen."""
    if graph.training or graph.microbatches > 1 or any(op.is_port for op in graph.ops):
        return frozenset()
    written = graph.outputs(Role.MUTATION)
    return frozenset(op.name for op in graph.of_kind("buffer") if op.target in written and not _is_statistic(graph, written[op.target]))


def free(graph: Graph) -> frozenset[str]:
    """Names of the states, and of the outputs that write them or a parameter back: that lies as it is stored."""
    found, written = states(graph), graph.outputs(Role.MUTATION)
    return found | {written[op.target].name for op in graph.of_kind("param", "buffer")
                    if op.target in written and (op.kind == "param" or op.name in found)}


def _is_statistic(graph: Graph, written: Op) -> bool:
    """Whether a norm makes what is written."""
    op = graph.op(written.refs[0].op)
    while registry.is_view(op) or registry.is_cast(op):
        op = graph.op(op.refs[0].op)
    return registry.family_of(op) is Family.NORM


def written_in_place(graph: Graph) -> frozenset[str]:
    """Names of the ops that replace rows of a state which nobody reads in its old form afterwards."""
    found: set[str] = set()
    for name in states(graph):
        target = graph.op(name).target
        ref = graph.outputs(Role.MUTATION)[target].refs[0]
        chain = []
        while ref.op != name and (op := graph.op(ref.op)).kind == "call" and op.target in ROW_WRITES:
            chain.append(op)
            ref = op.refs[0]
        if ref.op == name:
            found |= {op.name for op in chain if _is_last(graph, op)}
    return frozenset(found)


def _is_last(graph: Graph, write: Op) -> bool:
    """Whether all others who read what is written over, or a view of it, come before."""
    left, at = [write.refs[0]], graph.order[write.name]
    while left:
        ref = left.pop()
        for name, _ in graph.users.get(ref, ()):
            if graph.order[name] > at:
                return False
            if registry.is_view(graph.op(name)):
                left += [Ref(name, i) for i in range(len(graph.op(name).outputs))]
    return True
