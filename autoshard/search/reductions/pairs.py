"""Two nodes that many small nodes link become one node, and the small nodes, now with two neighbours, are minimised out.

A value, its two readers and its copies (one per layout) are such a cluster: every copy has three neighbours. Message
passing over the copies one by one may take each from another producer's strategy, a bound of a few percent too low; over
the pair it is exact. Example: u and v with 3 strategies each and 9 copies on (u, v, w) become one node of 9
strategies and one table to w.

Not a rule of the sweep: pairs are made where rows are gone, because nodes that load rows are not minimised out."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from autoshard.search.reductions import reduce_core
from autoshard.search.reductions.core import Core, stored_entries
from autoshard.search.reductions.steps import Masks
from autoshard.search.reductions.table import Table

FEWEST = 2  # small nodes that a pair must make go
REMEMBERED = 1000  # joint strategies; tables of larger pairs take megabytes each
PAIR, ROUND, STORED = 4_000_000, 40_000_000, 20_000_000  # where pairs may be larger: table entries of one, of a round, and of what is there before


def merge_pairs(core: Core, largest: int, expired: Callable[[], bool] = lambda: False, among: Collection[int] | None = None) -> None:
    """Merge pairs of at most `largest` joint strategies, and reduce, while there are any. What rounds with large ones computed is forgotten after
    each: copies are merged in the same round. `among`: the nodes that may be merged; default: all."""
    while not expired():
        pairs = _disjoint(core, [(u, v) for u, v in _candidates(core, largest) if among is None or u in among and v in among])
        if largest > REMEMBERED:
            pairs = _affordable(core, pairs)
        if not pairs:
            return
        for u, v in pairs:
            merge(core, u, v)
        reduce_core(core, expired, [u for u, _ in pairs])
        if largest > REMEMBERED:
            core.forget()


def _candidates(core: Core, largest: int) -> list[tuple[int, int]]:
    """Pairs by how many nodes they make go, most first, then smallest."""
    count: Counter[tuple[int, int]] = Counter()
    for c in core.alive:
        around = core.adj[c]
        if len(around) == 3 and not core.items[c]:
            a, b, d = sorted(around)
            count.update(((a, b), (a, d), (b, d)))
    size = {pair: len(core.cost[pair[0]]) * len(core.cost[pair[1]]) for pair, n in count.items() if n >= FEWEST}
    return sorted((p for p, n in size.items() if n <= largest), key=lambda p: (-count[p], size[p], p))


def _disjoint(core: Core, pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """A pair takes its whole neighbourhood: what the next one would gain there is known only after reducing."""
    taken: set[int] = set()
    out = []
    for u, v in pairs:
        if u not in taken and v not in taken:
            taken.update((u, v), core.adj[u], core.adj[v])
            out.append((u, v))
    return out


def _affordable(core: Core, pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those whose tables are not too large, as many as a round may make; copies share their tables and count once."""
    room = ROUND if stored_entries(core) <= STORED else 0
    seen: set[tuple[int, ...]] = set()
    out = []
    for u, v in pairs:
        around = (core.adj[u].keys() | core.adj[v].keys()) - {u, v}
        entries = len(core.cost[u]) * len(core.cost[v]) * sum(len(core.cost[w]) for w in around)
        key = (id(core.cost[u]), id(core.cost[v]), *map(id, core.adj[u].values()), *map(id, core.adj[v].values()))
        if entries > PAIR or key not in seen and entries > room:
            continue
        if key not in seen:
            seen.add(key)
            room -= entries
        out.append((u, v))
    return out


def merge(core: Core, u: int, v: int) -> None:
    """v moves into u, whose strategies become pairs (u's major)."""
    sizes = len(core.cost[u]), len(core.cost[v])
    between = core.adj[u].get(v)
    if between is not None:
        core.drop_edge(u, v)
    edges = [(w, core.memo_shaped(_repeated, sizes[1:], table)) for w, table in core.adj[u].items()]
    edges += [(w, core.memo_shaped(_tiled, sizes[:1], table)) for w, table in core.adj[v].items()]
    items = [(i, core.memo_shaped(_each_repeated, sizes[1:], i.amount)) for i in core.items[u]]
    items += [(i, core.memo_shaped(_all_repeated, sizes[:1], i.amount)) for i in core.items[v]]
    cost = core.memo(_joint, core.cost[u], core.cost[v], *(() if between is None else (between,)))
    core.remove(v)
    core.remove(u)
    core.cost[u] = cost
    for w, table in edges:
        core.add_edge(u, w, table)
    for item, amount in items:
        core.add_item(u, item.lo, item.hi, amount)
    core.undo.append(Pair(v, u, sizes[1]))


def _joint(a: np.ndarray, b: np.ndarray, *between: Table) -> np.ndarray:
    return (a[:, None] + b[None, :] + (between[0].a if between else 0.0)).ravel()


def _each_repeated(shape: tuple[int], amount: np.ndarray) -> np.ndarray:
    return np.repeat(amount, shape[0])


def _all_repeated(shape: tuple[int], amount: np.ndarray) -> np.ndarray:
    return np.tile(amount, shape[0])


def _repeated(shape: tuple[int], table: Table) -> Table:
    return Table(np.repeat(table.a, shape[0], axis=0))


def _tiled(shape: tuple[int], table: Table) -> Table:
    return Table(np.tile(table.a, (shape[0], 1)))


@dataclass(frozen=True, slots=True)
class Pair:
    """u and v became one node in u's place; its strategy is u's x `size` of v + v's."""

    v: int
    u: int
    size: int

    def lift(self, full: np.ndarray) -> None:
        full[self.u], full[self.v] = divmod(int(full[self.u]), self.size)

    def project(self, part: np.ndarray) -> None:
        part[self.u] = -1 if min(part[self.u], part[self.v]) < 0 else part[self.u] * self.size + part[self.v]

    def widen(self, masks: Masks) -> None:
        joint = masks.of[self.u].reshape(-1, self.size)
        masks.put(self.u, np.any(joint, axis=1))
        masks.put(self.v, np.any(joint, axis=0))
