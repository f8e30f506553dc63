"""Dominance with usage: strategy a goes when some b is never dearer, whatever the neighbours do, and never loads
a row more.

Example: costs [5, 3], edge rows [0, 1] and [1, 2]: the first is replaced by the second at a change of at most
1 + (3 - 5) = -1, so it goes, if its usage is not smaller."""
from __future__ import annotations

import numpy as np

from autoshard.search.reductions.better import joined, never_dearer
from autoshard.search.reductions.core import Core
from autoshard.search.reductions.table import Table

LARGEST_WORK = 60_000_000
REMEMBERED = 200  # strategies; what replaces what among more takes megabytes
BLOCK = 100_000  # differences that are compared at once
SMALL_WORK = 50_000  # below, looking for repetition takes longer than it saves


def replacement(table: np.ndarray) -> tuple[np.ndarray, np.ndarray | None] | None:
    """([a, b]: the most that replacing row a by row b can add, over the columns where row a is finite; kind of every row).
    With kinds, the first part is about the kinds: strategies repeat what they show a neighbour, of 120 matmul strategies
    it may see 20 different layouts. None when that is too much work."""
    if table.size * len(table) < SMALL_WORK:
        return _changes(table), None
    rows, row = distinct(table)
    columns, _ = distinct(np.ascontiguousarray(table[rows].T))
    if len(rows) ** 2 * len(columns) > LARGEST_WORK:
        return None
    return _changes(np.ascontiguousarray(table[np.ix_(rows, columns)])), row


def distinct(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(first row of every kind, kind of every row), kinds in order of their first rows."""
    raw, width = table.tobytes(), table.itemsize * table.shape[1]
    seen: dict[bytes, int] = {}  # of rows as bytes: several times faster than sorting them
    first: list[int] = []
    kind: list[int] = []
    for i in range(len(table)):
        row = raw[i * width:(i + 1) * width]
        if row not in seen:
            seen[row] = len(first)
            first.append(i)
        kind.append(seen[row])
    return np.array(first), np.array(kind)


def _changes(table: np.ndarray) -> np.ndarray:
    """Column by column of the table: numpy then compares whole stretches of rows with each other, a few of them at a time, which stay in cache."""
    k, m = table.shape
    columns = np.ascontiguousarray(table.T)
    out = np.empty((k, k))
    step = max(1, BLOCK // max(1, k * m))
    for a in range(0, k, step):
        difference = columns[:, None, :] - columns[:, a:a + step, None]  # inf - inf is nan here, and fmax skips it
        np.fmax.reduce(difference, axis=0, out=out[a:a + step])
    return out


def dominate(core: Core, v: int) -> bool:
    tables = list(core.adj[v].values())
    found = core.memo(_undominated, core.cost[v], *tables, *load_profile(core, v))
    if found is None:
        return False
    core.keep(v, *found)
    return True


def load_profile(core: Core, v: int) -> tuple[np.ndarray, ...]:
    """What the rows see of v, as memo arguments: nothing, or one array, strategies x stretches of rows."""
    items = core.items[v]
    if len(items) <= 1:
        return tuple(i.amount for i in items)
    points = sorted({p for i in items for p in (i.lo, i.hi)})
    rank = {p: n for n, p in enumerate(points)}
    shape = tuple((rank[i.lo], rank[i.hi]) for i in items)
    return (core.memo_shaped(_loads, shape, *(i.amount for i in items)),)


def _loads(shape: tuple[tuple[int, int], ...], *amounts: np.ndarray) -> np.ndarray:
    out = np.zeros((len(amounts[0]), max(hi for _, hi in shape)))
    for (lo, hi), amount in zip(shape, amounts, strict=True):
        out[:, lo:hi] += amount[:, None]
    return out


def _undominated(cost: np.ndarray, *parts: Table | np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """(indices of the strategies that stay, [a, b]: the most that the b-th of them adds instead of the a-th that goes);
    None when all stay. Equal ones leave the first."""
    k, changes = len(cost), []
    better = ~np.eye(k, dtype=bool)
    for part in parts:
        if isinstance(part, np.ndarray):
            for column in part.reshape(k, -1).T:
                better &= column[None, :] <= column[:, None]
        else:
            change = part.fact(replacement) if len(part.a) <= REMEMBERED else replacement(part.a)
            if change is None:
                return None
            changes.append(change)
    if k <= REMEMBERED:
        better &= _worst(cost, changes, np.arange(k), np.arange(k)) <= 0
    else:
        never_dearer(cost, *joined(changes, k), better)
    if not better.any():
        return None
    kept = np.ones(k, dtype=bool)
    for a in np.lexsort((-np.arange(k), -cost)):  # dearest and last first; only a strategy still kept may replace
        kept[a] = not (better[a] & kept).any()
    return np.flatnonzero(kept), _worst(cost, changes, np.flatnonzero(~kept), np.flatnonzero(kept))


def _worst(cost: np.ndarray, changes: list[tuple[np.ndarray, np.ndarray | None]], of: np.ndarray, by: np.ndarray) -> np.ndarray:
    """[a, b]: the most that strategy `by[b]` adds instead of `of[a]`."""
    worst: np.ndarray = cost[by][None, :] - cost[of][:, None]
    for most, kind in changes:
        worst += most[np.ix_(of, by)] if kind is None else most[kind[of][:, None], kind[by][None, :]]
    return worst
