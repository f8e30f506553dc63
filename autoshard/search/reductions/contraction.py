"""Functional contraction: when every choice of u leaves at most one finite choice of v, v becomes part of u.

Wider than a bijection, and safe with memory: v's loads move to u along the same function.
Example: table (u x v) [[2, inf], [inf, 4], [inf, 7]]: v = (0, 1, 1)[u], and u's cost grows by table and cost of v."""
from __future__ import annotations

import numpy as np

from autoshard.search.reductions.core import Core
from autoshard.search.reductions.elimination import GivenOne
from autoshard.search.reductions.table import Table

LARGEST_GROWTH = 2_000_000


def function(table: np.ndarray) -> np.ndarray | None:
    """For each row its only finite column; None when some row has two."""
    mask = np.isfinite(table)
    if table.shape[1] > 1 and np.count_nonzero(mask) > len(table):
        return None
    return np.argmax(mask, axis=1) if (mask.sum(axis=1) <= 1).all() else None


def has_host(core: Core, v: int) -> bool:
    """Whether some neighbour decides v. If v stays all the same, that is due to what is around that neighbour."""
    return any(table.T.fact(function) is not None for table in core.adj[v].values())


def contract(core: Core, v: int) -> bool:
    """Merge v into the smallest neighbour that decides it, unless the merge would make tables explode."""
    hosts = {u: choice for u, table in core.adj[v].items() if (choice := table.T.fact(function)) is not None}
    for u in sorted(hosts, key=lambda u: (len(core.cost[u]), u)):
        towards = core.adj[u][v]
        mutual = core.adj[v][u].fact(function) is not None
        if mutual and (len(core.adj[u]), u) < (len(core.adj[v]), v):
            continue  # merge the node with fewer edges into the other: its edges are what must be rewritten
        if _growth(core, v, u) <= LARGEST_GROWTH:
            _merge(core, v, u, towards, hosts[u])
            return True
    return False


def _growth(core: Core, v: int, u: int) -> int:
    width = sum(table.a.shape[1] for w, table in core.adj[v].items() if w != u and w not in core.adj[u])
    return width * len(core.cost[u]) - width * len(core.cost[v]) if len(core.cost[u]) > 2 * len(core.cost[v]) else 0


def _merge(core: Core, v: int, u: int, towards: Table, choice: np.ndarray) -> None:
    core.add_cost(u, core.memo(_decided_cost, towards, core.cost[v], choice))
    edges, items = dict(core.adj[v]), core.items[v]
    core.remove(v)
    for w, table in edges.items():
        if w != u:
            core.add_edge(u, w, core.memo(_rows, table, choice))
    for item in items:
        core.add_item(u, item.lo, item.hi, core.memo(np.take, item.amount, choice))
    core.undo.append(GivenOne(v, u, choice, core.memo(_only, towards, choice)))


def _only(towards: Table, choice: np.ndarray) -> np.ndarray:
    """What each strategy of v costs more than the decided one: it is the only one there is."""
    extra = np.full(towards.a.shape, np.inf)
    extra[np.arange(len(choice)), choice] = 0.0
    return extra


def _decided_cost(towards: Table, cost: np.ndarray, choice: np.ndarray) -> np.ndarray:
    return towards.a[np.arange(len(choice)), choice] + cost[choice]


def _rows(table: Table, choice: np.ndarray) -> Table:
    return Table(table.a[choice])
