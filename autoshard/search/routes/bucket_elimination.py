"""The problem at fixed prices of its rows, solved exactly where that is cheap: nodes are minimised out one after the other.

Bucket elimination (Dechter, 1999): the costs of a node, of its edges and of what was minimised out into it are one table over the node and the
neighbours that are left, and its least entries a table over these. Prices change the costs of nodes only, so the order of nodes and the sums of edges
serve all prices. With one mesh axis tables stay small: gpt of four layers, 744 nodes, has 1.2 million entries, and one price takes 40 ms where
reductions, pairs and sweeps take 250 to 800."""
from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from autoshard.search.board import MARGIN
from autoshard.search.reductions.core import Core, table_entries

MOST_ENTRIES = 4_000_000  # of all tables together; above, reductions and sweeps are as fast
MOST_PAIRS = 1_000_000  # entries of the core's own tables, above which none is tried
MOST_DIMS = 12  # of one table


@dataclass(frozen=True, eq=False)
class Bucket:
    """A node `v` with the nodes of `rest`, its neighbours when it goes, in the order in which these go. `edges`: what its edges cost, over v and
    `rest`. `into`: where what is left of it goes, the bucket of the first of `rest`, and as which shape; none where nothing is left but a number."""

    v: int
    rest: tuple[int, ...]
    edges: np.ndarray
    into: tuple[int, tuple[int, ...]] | None


@dataclass(frozen=True, eq=False)
class Elimination:
    """The order of a core's nodes, which serves all prices."""

    buckets: tuple[Bucket, ...]

    @staticmethod
    def of(core: Core) -> Elimination | None:
        """None where tables would be too large."""
        if table_entries(core) > MOST_PAIRS:
            return None
        order = _order(core)
        return None if order is None else Elimination(tuple(_buckets(core, order)))

    def solve(self, core: Core) -> Eliminated:
        """`core` at some prices: that of `of`, with other costs of nodes."""
        tables, least = [bucket.edges + _along(core.cost[bucket.v], 0, bucket.edges.ndim) for bucket in self.buckets], []
        value = core.constant
        for bucket, table in zip(self.buckets, tables, strict=True):
            left = table.min(axis=0)
            least.append(left)
            if bucket.into is None:
                value += float(left)
            else:
                tables[bucket.into[0]] += left.reshape(bucket.into[1])
        return Eliminated(self, tables, least, value, len(core.cost))


@dataclass(frozen=True, eq=False)
class Eliminated:
    """`value`: the least cost, infinite where no choice is possible. `tables`: of the buckets, with what was minimised out into them; `least`: their
    least entries."""

    order: Elimination
    tables: list[np.ndarray]
    least: list[np.ndarray]
    value: float
    count: int

    def choice(self) -> np.ndarray:
        """A choice of the core that costs `value`."""
        out = np.zeros(self.count, dtype=np.int64)
        for bucket, table in zip(reversed(self.order.buckets), reversed(self.tables), strict=True):
            out[bucket.v] = int(table[(slice(None), *(out[u] for u in bucket.rest))].argmin())
        return out

    def possible(self, upper: float) -> dict[int, np.ndarray]:
        """Masks of the strategies, by node, that some choice of cost at most `upper` takes. Exact: the least cost of every strategy is known, by the
        same tables from the last to the first."""
        buckets, out, upper = self.order.buckets, {}, upper + MARGIN * max(abs(upper), abs(self.value))
        whole: list[np.ndarray] = [np.zeros(0)] * len(buckets)
        for i in reversed(range(len(buckets))):
            bucket, table = buckets[i], self.tables[i]
            if bucket.into is None:
                whole[i] = table + (self.value - self.least[i])
            else:
                at, shape = bucket.into
                others = tuple(axis for axis, n in enumerate(shape) if n == 1)
                rest = whole[at].min(axis=others).reshape(self.least[i].shape) if others else whole[at]
                with np.errstate(invalid="ignore"):
                    whole[i] = table + np.where(np.isfinite(self.least[i]), rest - self.least[i], math.inf)
            out[bucket.v] = whole[i].reshape(len(table), -1).min(axis=1) <= upper
        return out


def _along(vector: np.ndarray, axis: int, dims: int) -> np.ndarray:
    """A vector as an array of `dims` dims, along one."""
    return vector.reshape([-1 if d == axis else 1 for d in range(dims)])


def _order(core: Core) -> list[tuple[int, frozenset[int]]] | None:
    """Nodes with their neighbours when they go: always the one whose table is smallest."""
    around = {v: set(core.adj[v]) for v in core.alive}
    size = {v: len(core.cost[v]) for v in around}
    heap = [(_entries(v, around[v], size), v) for v in around]
    heapq.heapify(heap)
    out, entries = [], 0
    while heap:
        now, v = heapq.heappop(heap)
        if v not in around or now != _entries(v, around[v], size):
            continue  # an entry from before its neighbours changed
        entries += now
        if entries > MOST_ENTRIES or len(around[v]) >= MOST_DIMS:
            return None
        rest = around.pop(v)
        out.append((v, frozenset(rest)))
        for u in rest:
            around[u] |= rest
            around[u] -= {u, v}
        for u in rest:
            heapq.heappush(heap, (_entries(u, around[u], size), u))
    return out


def _entries(v: int, around: Iterable[int], size: dict[int, int]) -> int:
    return math.prod((size[u] for u in around), start=size[v])


def _buckets(core: Core, order: list[tuple[int, frozenset[int]]]) -> list[Bucket]:
    place = {v: i for i, (v, _) in enumerate(order)}
    scopes = [(v, *sorted(rest, key=place.__getitem__)) for v, rest in order]
    out = []
    for v, *rest in scopes:
        edges = np.zeros([len(core.cost[u]) for u in (v, *rest)])
        for axis, u in enumerate(rest, 1):
            if u in core.adj[v]:
                table = core.adj[v][u].a
                edges += table.reshape([table.shape[0], *(table.shape[1] if d == axis else 1 for d in range(1, edges.ndim))])
        into = None
        if rest:
            at = place[rest[0]]
            into = at, tuple(len(core.cost[u]) if u in rest else 1 for u in scopes[at])
        out.append(Bucket(v, tuple(rest), edges, into))
    return out
