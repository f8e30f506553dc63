"""The gradient of a parameter that several stages read, as a part in each of them.

autograd adds the parts up, so the gradient of one stage would travel to another in every micro-batch, as large as the weight. Apart,
every stage adds up its own over the micro-batches, and the sum over stages is taken once a step."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from autoshard.base.graph import EARLY, Graph, Op, Ref
from autoshard.base.roles import Role
from autoshard.program.flow import is_passing

SUM = torch.ops.aten.add.Tensor


def apart(graph: Graph, home: Mapping[str, int]) -> tuple[Graph, dict[str, int]]:
    """The graph with one gradient output per stage that has a part of it, and the stage of every call in it."""
    stages, ops, gone = dict(home), [], set()
    for op in graph.ops:
        if op.kind != "output" or op.target.role is not Role.GRADIENT:
            ops.append(op)
            continue
        leaves, way = _parts(graph, op.refs[0])
        where = sorted({stages[leaf.op] for leaf in leaves})
        if len(where) == 1:
            stages.update(dict.fromkeys((o.name for o in way), where[0]))
            ops.append(op)
            continue
        gone |= {o.name for o in way}
        for s in where:
            made, ref = _summed(graph, [leaf for leaf in leaves if stages[leaf.op] == s], way, s)
            stages.update(dict.fromkeys((o.name for o in made), s))
            ops += [*made, replace(op, name=op.name if s == where[0] else f"{op.name}@{s}", args=(ref,))]
    return replace(graph, ops=tuple(op for op in ops if op.name not in gone)), stages


def _parts(graph: Graph, ref: Ref) -> tuple[list[Ref], list[Op]]:
    """The parts whose sum, through views and casts, is the gradient, and the ops on the way, first to last. Only what nothing else reads
    is taken apart."""
    leaves, way, todo = [], [], [ref]
    while todo:
        at = todo.pop()
        op = graph.op(at.op)
        alone = len(graph.users[at]) == 1 and op.phase not in EARLY
        if alone and (is_passing(op) or _is_sum(op)) and all(graph.op(r.op).kind == "call" and graph.op(r.op).phase not in EARLY for r in op.refs):
            way.append(op)
            todo += reversed(op.refs)
        else:
            leaves.append(at)
    return leaves, sorted(way, key=lambda op: graph.order[op.name])


def _is_sum(op: Op) -> bool:
    return op.kind == "call" and op.target is SUM and len(op.refs) == 2 == len(op.args) and not op.kwargs


def _summed(graph: Graph, leaves: list[Ref], way: list[Op], stage: int) -> tuple[list[Op], Ref]:
    """`way` for some of the leaves alone: a sum of one part is that part."""
    now: dict[Ref, Ref | None] = {leaf: leaf for leaf in leaves}
    made: list[Op] = []
    for op in way:
        refs = [r for r in (now.get(r) for r in op.refs) if r is not None]
        if not refs or (_is_sum(op) and len(refs) == 1):
            now[Ref(op.name)] = refs[0] if refs else None
            continue
        left = iter(refs)
        args = tuple(next(left) if isinstance(a, Ref) else a for a in op.args)
        made.append(replace(op, name=f"{op.name}@{stage}", args=args))
        now[Ref(op.name)] = Ref(made[-1].name)
    (last,) = (now[Ref(op.name)] for op in way[-1:]) if way else (leaves[0],)
    assert last is not None, "a stage with a part of a gradient has a leaf of it"
    return made, last
