"""Where a choice costs more than what the messages prove: there the bound is loose."""
from __future__ import annotations

import numpy as np

from autoshard.search.dual.dual import Dual
from autoshard.search.dual.jit import compiled
from autoshard.search.dual.messages import least_slack
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
            w, back = p.adj_node[a], p.adj_back[a]
            if w > v:
                m, n, row, column = p.adj_message[a], p.adj_message[back], p.adj_kind[a], p.adj_kind[back]
                slack = p.table[p.adj_table[a] + p.kind[row + choice[v]] * p.adj_kinds[back] + p.kind[column + choice[w]]]
                slack -= message[m + choice[v]] + message[n + choice[w]]
                slack -= least_slack(p.table, p.kind, message, p.adj_table[a], p.adj_kinds[a], p.adj_kinds[back], row, column, k,
                                     p.start[w + 1] - p.start[w], m, n)
                excess[v] += slack / 2
                excess[w] += slack / 2
