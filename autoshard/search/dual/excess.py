"""Where a choice costs more than what the messages prove: there the bound is loose."""
from __future__ import annotations

import numpy as np

from autoshard.search.dual.dual import Dual
from autoshard.search.dual.jit import compiled
from autoshard.search.dual.packed import Packed

SHARE = 1e-3  # of the whole excess, that a node must have


def loose_nodes(dual: Dual, choice: np.ndarray) -> set[int]:
    """Nodes of the core at which `choice`, a strategy for each packed node, has the excess: what it costs beyond the bound that was proven is the sum
    over nodes and edges of what it costs there, with the messages, beyond the least. An edge's is shared by its ends."""
    excess = np.zeros(len(dual.nodes))
    _excess(dual.packed, dual.packed.cost, dual.proven, choice, excess)
    return {int(dual.nodes[i]) for i in np.flatnonzero(excess > SHARE * excess.sum())}


@compiled
def _excess(p: Packed, cost: np.ndarray, message: np.ndarray, choice: np.ndarray, excess: np.ndarray) -> None:
    for v in range(len(p.start) - 1):
        base, k = p.start[v], p.start[v + 1] - p.start[v]
        least, own = np.inf, np.inf
        for s in range(k):
            value = cost[base + s]
            for a in range(p.adj_ptr[v], p.adj_ptr[v + 1]):
                value += message[p.adj_message[a] + s]
            least = min(least, value)
            own = value if s == choice[v] else own
        excess[v] += own - least
        for a in range(p.adj_ptr[v], p.adj_ptr[v + 1]):
            w = p.adj_node[a]
            if w > v:
                more = _edge_excess(p, message, a, k, p.start[w + 1] - p.start[w], choice[v], choice[w]) / 2
                excess[v] += more
                excess[w] += more


@compiled
def _edge_excess(p: Packed, message: np.ndarray, a: int, k: int, width: int, mine: int, other: int) -> float:
    back = p.adj_back[a]
    m, n, row, column, columns, table = p.adj_message[a], p.adj_message[back], p.adj_kind[a], p.adj_kind[back], p.adj_kinds[back], p.adj_table[a]
    least = np.inf
    for s in range(k):
        for t in range(width):
            least = min(least, p.table[table + p.kind[row + s] * columns + p.kind[column + t]] - message[m + s] - message[n + t])
    return p.table[table + p.kind[row + mine] * columns + p.kind[column + other]] - message[m + mine] - message[n + other] - least
