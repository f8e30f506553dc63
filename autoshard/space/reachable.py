"""Drop strategies that cannot meet the placements of user collectives (arc consistency, spread from their marks).

A user collective that reads a Partial value needs a producer that makes Partial: no redistribution does. The search would
find that by itself; baselines and propagation look only one op ahead. A model without such a producer gets an error with its line."""
from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

import numpy as np

from autoshard.base.graph import Graph, Op, Ref
from autoshard.base.spec import PSUM
from autoshard.errors import SeedError
from autoshard.seeds.marks import is_user_collective, marks
from autoshard.space.strategies import StrategySet


def reachable(graph: Graph, strategies: Mapping[str, StrategySet]) -> dict[str, StrategySet]:
    """`strategies` without those that some neighbour cannot meet, spread from the user collectives. Raises SeedError where an op
    has none left."""
    found = dict(strategies)
    todo = deque(op for op in marks(graph) if is_user_collective(op))
    while todo:
        op = todo.popleft()
        for ref, reader, index in _edges(graph, op):
            maker = graph.op(ref.op)
            meet = _meet(found[ref.op].outputs[:, ref.index], found[reader.name].inputs[:, index])
            for other, keep in ((maker, meet.any(axis=1)), (reader, meet.any(axis=0))):
                if not keep.any():
                    raise SeedError(_nothing(maker, reader, op))
                if not keep.all():
                    found[other.name] = found[other.name].keep(keep)
                    todo.append(other)
    return found


def _edges(graph: Graph, op: Op) -> Iterator[tuple[Ref, Op, int]]:
    """(value, op that reads it, which input) of what `op` reads and makes."""
    yield from ((ref, op, i) for i, ref in enumerate(op.refs))
    for index in range(len(op.outputs)):
        yield from ((Ref(op.name, index), graph.op(name), i) for name, i in graph.users.get(Ref(op.name, index), ()))


def _meet(made: np.ndarray, read: np.ndarray) -> np.ndarray:
    """[strategies of the producer, of the reader]: whether a redistribution leads from the producer's spec to the reader's."""
    used, mine = np.unique(made, axis=0, return_inverse=True)
    wanted, theirs = np.unique(read, axis=0, return_inverse=True)
    able = np.all((wanted[None] > PSUM) | (used[:, None] == wanted[None]), axis=2)
    return able[mine.reshape(-1)][:, theirs.reshape(-1)]


def _nothing(maker: Op, reader: Op, op: Op) -> str:
    at = f" {op.code!r}" if op.code else ""
    return (f"the model's own collective{at} at {op.source or op.name} reduces a sum of parts, and {maker.where} cannot make one for "
            f"{reader.where}: only sums over what is split can be reduced, for example a matmul over its inner dim; take the "
            "collective out, or move it behind such a sum")
