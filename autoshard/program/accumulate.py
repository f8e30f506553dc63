"""The graph of a micro-batch -> the graph of a step that runs it several times and adds up the gradients.

Parameters are read through `hold` ops of the window "start", gradients of parameters leave through `accumulate` ops, and their
outputs are in the window "end" (see base/windows.py). So whether a parameter is gathered once a step or for every micro-batch, and whether
a gradient is reduced for every micro-batch or once a step, are layouts of ops, which the search chooses like all others."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from autoshard.base.graph import BACKWARD, Graph, Op, Ref
from autoshard.base.roles import Role
from autoshard.base.windows import BATCH_DIM, END, JOIN, JOIN_DIM, START, accumulate_op, hold_op
from autoshard.program.flow import is_passing, narrowed, reduction_dtypes

Joins = Sequence[tuple[str, int]]
"""Per user output, how it is put together (see base/windows.py) and the dim along which pieces are."""


def accumulating(graph: Graph, microbatches: int, batch_dims: Sequence[int | None], joins: Joins) -> Graph:
    """`graph` of a micro-batch. `batch_dims`: of its inputs. The same graph for one micro-batch: nothing is accumulated."""
    if microbatches == 1:
        return graph
    dims = iter(batch_dims)
    ops = []
    for op in graph.ops:
        if op.kind == "input":
            op = replace(op, kwargs=((BATCH_DIM, next(dims)),))
        elif op.kind == "output" and op.target.role is Role.USER:
            how, dim = joins[op.target.name]
            op = replace(op, kwargs=((JOIN, how), (JOIN_DIM, dim)))
        ops.append(op)
    return _in_order(replace(_with_accumulators(_with_holds(replace(graph, ops=tuple(ops)))), microbatches=microbatches))


def _in_order(graph: Graph) -> Graph:
    """Ops that run once, at the start and at the end; the others keep their order."""
    turn = {START: 0, END: 2}
    return replace(graph, ops=tuple(sorted(graph.ops, key=lambda op: turn.get(op.phase, 1))))


def _with_holds(graph: Graph) -> Graph:
    """Parameters, casts that make them narrower, and what holds them, at the start."""
    narrow = narrowed(graph)
    early = {name for ref in narrow for name, _ in graph.users[ref]}
    held: dict[Ref, Ref] = {}
    ops: list[Op] = []
    for op in graph.ops:
        first = op.kind in ("param", "buffer") or op.name in early
        ops.append(replace(op, phase=START) if first else op.reading(lambda ref: held.get(ref, ref)))
        ref = Ref(op.name)
        if (op.kind == "param" and ref not in narrow or op.name in early) and graph.users.get(ref):
            held[ref] = Ref(f"held:{op.target if op.kind == 'param' else op.name}")
            ops.append(Op(held[ref].op, "call", hold_op(), (ref,), outputs=op.outputs[:1], phase=START))
    return replace(graph, ops=tuple(ops))


def _with_accumulators(graph: Graph) -> Graph:
    """Gradients of parameters are accumulated in the dtype they are summed over ranks in; casts to the stored one come after."""
    params = {op.target for op in graph.of_kind("param")}
    leaves = [op for name, op in graph.outputs(Role.GRADIENT).items() if name in params and op.refs]
    dtypes = reduction_dtypes(graph)
    ways = {op.name: _way(graph, op, dtypes) for op in leaves}
    late = {name for way in ways.values() for name in way[1]}
    after: dict[str, list[Op]] = {}
    summed: dict[Ref, Ref] = {}
    for op in leaves:
        ref = ways[op.name][0]
        if ref not in summed:
            summed[ref] = Ref(f"sum:{op.target.name}")
            made = Op(summed[ref].op, "call", accumulate_op(), (ref,), outputs=(graph.meta(ref),), phase=BACKWARD)
            after.setdefault(ref.op, []).append(made)
    ends = {op.name for op in leaves} | late
    ops: list[Op] = []
    for op in graph.ops:
        ops.append(replace(op.reading(lambda ref: summed.get(ref, ref)), phase=END) if op.name in ends else op)
        ops += after.get(op.name, ())
    return replace(graph, ops=tuple(ops))


def _way(graph: Graph, leaf: Op, dtypes: Mapping[Ref, torch.dtype]) -> tuple[Ref, tuple[str, ...]]:
    """The value of a gradient output that is accumulated, and the casts from there to the output. `dtypes`: see `reduction_dtypes`."""
    ref, casts = leaf.refs[0], []
    wanted: torch.dtype | None = dtypes.get(ref)
    while wanted is not None and graph.meta(ref).dtype != wanted:
        op = graph.op(ref.op)
        if not is_passing(op) or len(graph.users[ref]) > 1:
            return leaf.refs[0], ()
        casts.append(op.name)
        ref = op.refs[0]
    return ref, tuple(casts)
