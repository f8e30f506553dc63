"""Ops that every stage makes for itself instead of receiving their values: masks, position tables, views and casts of parameters."""
from __future__ import annotations

from autoshard.base.graph import Graph, Ref
from autoshard.base.roles import Role
from autoshard.base.windows import START
from autoshard.program.flow import param_derived
from autoshard.program.tracing.tape import is_random


def repeated_ops(graph: Graph) -> frozenset[str]:
    """Calls whose values need no gradient and come of constants, buffers and inputs alone, which are on all ranks, and those that only view or
    cast a parameter, or hold it for a step. Random ops are not repeated: two stages would draw different numbers for one value."""
    trained = graph.outputs(Role.GRADIENT)
    free = {op.name for op in graph.of_kind("buffer", "input") if op.target not in trained}
    derived = param_derived(graph)
    for op in graph.of_kind("call"):
        if all(r.op in free for r in op.refs) and not is_random(op.target):
            free.add(op.name)
    passing = {op.name for op in graph.of_kind("call") if Ref(op.name) in derived or op.phase == START}
    return frozenset(op.name for op in graph.of_kind("call") if op.name in free or op.name in passing)
