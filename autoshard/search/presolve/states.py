"""States that only one neighbour tells apart become one state.

If all edges of v but the one to u, and all its items, treat a group of strategies alike (up to a constant), then given
u's choice the best of the group is known: the group is one strategy whose edge to u is the minimum. A copy node's
states "made from p" for all p are such a group: the consumers see only that the copy exists."""
from __future__ import annotations

import numpy as np

from autoshard.search.core import Core, Table
from autoshard.search.presolve.dominance import load_profile, replacement
from autoshard.search.undo import States


def alike(table: np.ndarray) -> np.ndarray | None:
    """[a, b]: rows a and b differ by a constant, so that this neighbour does not tell them apart."""
    change = replacement(table)
    return None if change is None else change + change.T == 0  # the most and the least of the difference agree


def merge_states(core: Core, v: int) -> bool:
    if len(core.adj[v]) < 2 and not core.items[v]:
        return False
    tables, profile = list(core.adj[v].values()), load_profile(core, v)
    which = core.memo(_told_apart_by_one, *tables, *profile)
    if which is None:
        return False
    u, towards = list(core.adj[v].items())[which]
    others = [table for w, table in core.adj[v].items() if w != u]
    merged = core.memo(_merged, core.cost[v], towards, *others, *profile)
    if merged is None:
        return False
    _apply(core, v, u, towards, merged)
    return True


def _told_apart_by_one(*parts) -> int | None:
    """The position of a table that alone tells some two strategies apart, all other tables and loads not; or None."""
    masks = []
    for part in parts:
        if isinstance(part, np.ndarray):
            load = part.reshape(len(part), -1)
            masks.append((load[:, None, :] == load[None, :, :]).all(axis=2))
        else:
            masks.append(part.fact(alike))
    if any(mask is None for mask in masks):
        return None
    different = sum((~mask).astype(np.int64) for mask in masks)
    np.fill_diagonal(different, len(masks) + 1)
    for which, (part, mask) in enumerate(zip(parts, masks, strict=True)):
        if not isinstance(part, np.ndarray) and (different - ~mask <= 0).any():
            return which
    return None


def _apply(core: Core, v: int, u: int, towards: Table, merged: tuple) -> None:
    kept, cost, table, best, group, offset = merged
    core.undo.append(States(v, u, best, group, (towards, offset, table)))
    items, core.items[v] = core.items[v], ()
    for w, old in list(core.adj[v].items()):
        new = table if w == u else core.memo(_take, old, kept)
        core.adj[v][w], core.adj[w][v] = new, new.T
    core.cost[v] = cost
    for item in items:
        core.add_item(v, item.lo, item.hi, core.memo(np.take, item.amount, kept))


def _take(table: Table, kept: np.ndarray) -> Table:
    return Table(table.a[kept])


def _merged(cost: np.ndarray, towards: Table, *parts) -> tuple | None:
    """(kept, cost, table to u, best original state [state, choice of u], group and offset of each original) or None."""
    k = len(cost)
    same, shift = np.ones((k, k), dtype=bool), np.zeros((k, k))
    for part in parts:
        if isinstance(part, np.ndarray):
            load = part.reshape(k, -1)
            same &= (load[:, None, :] == load[None, :, :]).all(axis=2)
        else:
            change = part.fact(replacement)
            if change is None:
                return None
            same &= part.fact(alike)
            shift = shift + np.where(same, change, 0.0)
    leader = np.argmax(same, axis=0)
    same_as_leader = same[np.arange(k), leader]
    leader = np.where(same_as_leader, leader, np.arange(k))
    kept = np.unique(leader)
    if len(kept) == k:
        return None
    group = np.searchsorted(kept, leader)
    offset = cost + shift[leader, np.arange(k)]
    table = np.full((len(kept), towards.a.shape[1]), np.inf)
    best = np.zeros(table.shape, dtype=np.int64)
    for s in range(k):
        candidate = towards.a[s] + offset[s]
        better = candidate < table[group[s]]
        table[group[s]][better] = candidate[better]
        best[group[s]][better] = s
    return kept, np.zeros(len(kept)), Table(table), best, group, offset
