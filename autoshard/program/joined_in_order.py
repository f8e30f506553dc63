"""Parts are put together in the memory order that is wanted, not copied into it afterwards.

The gradients of q, k and v that come from one weight are joined as attention gives them, [b, h, t, 3 d], and then copied into [b, t, h, 3 d], the
order of the product they came from. Turned before they are joined, each element is copied once: turning takes no time. The values are the same.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from autoshard.base.graph import Graph, Op, Ref

aten = torch.ops.aten


def with_joins_in_order(graph: Graph) -> Graph:
    """An equal graph without contiguous copies of turned joins that nothing else reads."""
    found = {op.name: pair for op in graph.of_kind("call") if (pair := _turned_join(graph, op)) is not None}
    if not found:
        return graph
    gone = {op.name for pair in found.values() for op in pair}
    same = {Ref(name): Ref(join.name) for name, (_, join) in found.items()}
    ops: list[Op] = []
    for op in graph.ops:
        if op.name in found:
            ops += _joined_in_order(graph, op, *found[op.name])
        elif op.name not in gone:
            ops.append(op.reading(lambda ref: same.get(ref, ref)))
    return replace(graph, ops=tuple(ops))


def _turned_join(graph: Graph, op: Op) -> tuple[Op, Op] | None:
    """Of a contiguous copy, the op that turns what it reads, and the join that this one turns."""
    if op.target is not aten.clone.default or dict(op.kwargs).get("memory_format") is not torch.contiguous_format:
        return None
    turn = _sole(graph, op, op.args[0], aten.transpose.int, aten.permute.default)
    join = _sole(graph, op, turn.args[0], aten.cat.default) if turn is not None else None
    if turn is None or join is None or len({len(graph.meta(ref).shape) for ref in join.refs}) != 1:  # torch lets empty tensors of one dim pass
        return None
    return turn, join


def _joined_in_order(graph: Graph, copy: Op, turn: Op, join: Op) -> Iterator[Op]:
    """The turned parts, and their join."""
    order = _order(turn)
    names = {ref: f"{join.name}_part_{i}" for i, ref in enumerate(dict.fromkeys(join.refs))}
    for ref, name in names.items():
        meta = graph.meta(ref)
        turned = replace(meta, shape=tuple(meta.shape[d] for d in order), factors=tuple(meta.factors[d] for d in order))
        yield replace(turn, name=name, target=aten.permute.default, args=(ref, order), outputs=(turned,))
    dim = order.index((join.args[1] if len(join.args) > 1 else 0) % len(order))
    yield replace(join, args=(tuple(Ref(names[ref]) for ref in join.args[0]), dim), outputs=copy.outputs)


def _sole(graph: Graph, reader: Op, ref: Ref, *targets: object) -> Op | None:
    """The op of one of `targets` that makes `ref` in the reader's phase, if nothing else reads it."""
    op = graph.op(ref.op)
    fits = op.kind == "call" and op.target in targets and op.phase == reader.phase and not op.kwargs
    return op if fits and len(graph.users.get(ref, ())) == 1 else None


def _order(turn: Op) -> tuple[int, ...]:
    """The dims of what it reads, in the order of its result."""
    rank = len(turn.outputs[0].shape)
    if turn.target is aten.permute.default:
        return tuple(d % rank for d in turn.args[1])
    order, (a, b) = list(range(rank)), (d % rank for d in turn.args[1:])
    order[a], order[b] = b, a
    return tuple(order)
