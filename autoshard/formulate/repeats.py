"""Values that are read alike, as those of repeated layers are: what the first one adds to the problem the others add too, with nodes of their own."""
from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np

from autoshard.base.graph import Ref
from autoshard.base.windows import is_hold
from autoshard.formulate.builder import Builder
from autoshard.formulate.copies import CopyNode
from autoshard.formulate.values import is_saved
from autoshard.search.problem import Edge


@dataclass(frozen=True, eq=False)
class Added:
    """What a value added. Nodes are numbered: its own is 0, those of its readers follow, then the new ones, which are copy nodes. `readers`: per copy
    node the places of its readers among all that read the value."""

    costs: list[np.ndarray]
    copies: list[CopyNode]
    readers: list[tuple[int, ...]]
    edges: list[tuple[int, int, Edge]]
    items: list[tuple[int, np.ndarray, int, np.ndarray]]
    saved: list[tuple[int, np.ndarray, np.ndarray]]


def signature(b: Builder, ref: Ref) -> tuple[Hashable, list[int]]:
    """Equal for values that add the same, and the nodes of the value and of its readers: all that is asked of a value besides its name. For
    values without a recompute source."""
    graph, units = b.table.graph, b.units
    home = units.index(ref.op)
    nodes = {home: 0}
    reads = []
    for name, index in graph.users.get(ref, ()):
        node, op = units.index(name), graph.op(name)
        if node == home:
            reads.append(None)
        else:
            reads.append((nodes.setdefault(node, len(nodes)), id(units.inputs(name, index)), op.phase, is_hold(op), ref in op.kept))
    op = graph.op(ref.op)
    own = b.table.kind(ref), id(units.outputs(ref)), b.table.hideable(ref), op.kind, is_saved(graph, ref), b.is_read_late(ref), b.has_bytes(ref.op)
    return (*own, tuple(reads)), list(nodes)


def added(b: Builder, before: tuple[int, int, int, int, int], ref: Ref, nodes: list[int]) -> Added:
    """What is in the builder since its `lengths` were `before`."""
    costs, copies, edges, items, saved = before
    place = {node: at for at, node in enumerate([*nodes, *range(costs, len(b.costs))])}
    users = {user: at for at, user in reversed(list(enumerate(b.table.graph.users.get(ref, ()))))}
    return Added(b.costs[costs:], b.copies[copies:], [tuple(users[r] for r in copy.readers) for copy in b.copies[copies:]],
                 [(place[e.u], place[e.v], e) for e in b.edges[edges:]], [(place[n], *rest) for n, *rest in b.items[items:]],
                 [(place[n], *rest) for n, *rest in b.saved[saved:]])


def again(b: Builder, known: Added, ref: Ref, nodes: list[int], group: Callable[[CopyNode], int]) -> None:
    """Add it for another value of the same signature. `group`: the group of a copy node."""
    there = [*nodes, *range(len(b.costs), len(b.costs) + len(known.costs))]
    users = b.table.graph.users.get(ref, ())
    copies = [CopyNode(ref, c.spec, c.states, tuple(users[at] for at in places)) for c, places in zip(known.copies, known.readers, strict=True)]
    b.costs += known.costs
    b.copies += copies
    b.groups += map(group, copies)
    b.edges += [Edge(there[u], there[v], e.table, e.rows, e.cols) for u, v, e in known.edges]
    b.items += [(there[n], *rest) for n, *rest in known.items]
    b.saved += [(there[n], *rest) for n, *rest in known.saved]
