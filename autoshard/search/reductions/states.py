"""States that only one neighbour tells apart become one state.

If all edges of v but the one to u, and all its items, treat a group of strategies alike (up to a constant), then given
u's choice the best of the group is known: the group is one strategy whose edge to u is the minimum. A copy node's
states "made from p" for all p are such a group: the consumers see only that the copy exists."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoshard.search.reductions.core import Core
from autoshard.search.reductions.dominance import distinct, load_profile
from autoshard.search.reductions.steps import Masks
from autoshard.search.reductions.table import Table

MIX = 0x9E3779B97F4A7C15  # an odd number: multiples of it spread over 64 bits

Merged = tuple[np.ndarray, np.ndarray, Table, np.ndarray, np.ndarray, np.ndarray]
"""(kept, cost, table to u, best original state [state, choice of u], group and offset of each original)."""


def alike(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(kind of every row, its first finite entry): rows of one kind differ by a constant, so that this neighbour does not
    tell them apart."""
    first = table[np.arange(len(table)), np.argmax(np.isfinite(table), axis=1)]
    first = np.where(np.isfinite(first), first, 0.0)
    return distinct(table - first[:, None] + 0.0)[1], first  # + 0.0: no minus zero


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


def _told_apart_by_one(*parts: Table | np.ndarray) -> int | None:
    """The position of a table that alone tells some two strategies apart, all other tables and loads not; or None."""
    looks = [_kinds(part)[0] for part in parts]
    k = len(looks[0])
    full = [which for which, look in enumerate(looks) if look.max() == k - 1]  # tells all apart: it or none is alone
    if len(full) > 1:
        return None
    together = np.array(looks, dtype=np.uint64) + np.uint64(1)
    together *= (np.uint64(MIX) * np.arange(1, 2 * len(parts), 2, dtype=np.uint64))[:, None]  # whoever merges looks again
    total = together.sum(axis=0)
    for which in full or range(len(parts)):
        if not isinstance(parts[which], np.ndarray) and len(set((total - together[which]).tolist())) < k:
            return which
    return None


def _kinds(part: Table | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`alike` for a table or loads; equal loads are alike."""
    if isinstance(part, np.ndarray):
        return distinct(part.reshape(len(part), -1) + 0.0)[1], np.zeros(len(part))
    return part.fact(alike)


def _apply(core: Core, v: int, u: int, towards: Table, merged: Merged) -> None:
    kept, cost, table, best, group, offset = merged
    core.undo.append(States(v, u, best, group, (towards.a, offset, table.a)))
    items, core.items[v] = core.items[v], ()
    for w, old in list(core.adj[v].items()):
        new = table if w == u else core.memo(_take, old, kept)
        core.adj[v][w], core.adj[w][v] = new, new.T
    core.cost[v] = cost
    for item in items:
        core.add_item(v, item.lo, item.hi, core.memo(np.take, item.amount, kept))


def _take(table: Table, kept: np.ndarray) -> Table:
    return Table(table.a[kept])


def _merged(cost: np.ndarray, towards: Table, *parts: Table | np.ndarray) -> Merged | None:
    """None where no states are alike."""
    k = len(cost)
    kinds = [_kinds(part) for part in parts]
    kept, group = distinct(np.stack([kind for kind, _ in kinds], axis=1)) if kinds else (np.zeros(1, dtype=np.int64), np.zeros(k, dtype=np.int64))
    if len(kept) == k:
        return None
    offset = cost + sum(first - first[kept][group] for _, first in kinds)
    table = np.full((len(kept), towards.a.shape[1]), np.inf)
    best = np.zeros(table.shape, dtype=np.int64)
    for s in range(k):
        candidate = towards.a[s] + offset[s]
        better = candidate < table[group[s]]
        table[group[s]][better] = candidate[better]
        best[group[s]][better] = s
    return kept, np.zeros(len(kept)), Table(table), best, group, offset


@dataclass(frozen=True, slots=True)
class States:
    """Strategies of v were merged: `best[state, choice of u]` is the one a state stands for, `group` the state of each.
    `dearer` = (costs to u before, their shift per strategy, costs after)."""

    v: int
    u: int
    best: np.ndarray
    group: np.ndarray
    dearer: tuple[np.ndarray, np.ndarray, np.ndarray]

    def lift(self, full: np.ndarray) -> None:
        full[self.v] = self.best[full[self.v], full[self.u]]

    def project(self, part: np.ndarray) -> None:
        if part[self.v] >= 0:
            part[self.v] = self.group[part[self.v]]

    def widen(self, masks: Masks) -> None:
        masks.run(self.v, _states, *self.dearer, self.group, masks.of[self.v], masks.of[self.u])


def _states(shape: tuple[float], before: np.ndarray, shift: np.ndarray, after: np.ndarray, group: np.ndarray, alive_v: np.ndarray,
            alive_u: np.ndarray) -> np.ndarray:
    each = before[:, alive_u] + shift[:, None]
    close = (each <= after[group][:, alive_u] + shape[0]) & np.isfinite(each)
    return alive_v[group] & close.any(axis=1)
