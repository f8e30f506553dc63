"""The problem while it is being reduced: dense tables, mutable, with an undo list.

Models repeat their layers, so the same few tables occur thousands of times. Tables and vectors are immutable
and shared: their identity stands for their content, and `Core.memo` runs each distinct operation once.
Nothing here needs a compiler: the Python work is a few microseconds a step and the arithmetic is numpy.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from autoshard.base.memory import free_memory
from autoshard.errors import ProblemError, SearchSizeError
from autoshard.search.problem import Edge, Problem
from autoshard.search.reductions.steps import Fixed, Keep, Masks, Step
from autoshard.search.reductions.table import Kinds, Table

ENTRY_BYTES, LITTLE = 40, 1e9
"""Memory that an entry of a table takes while a problem is reduced: with its transpose, and what is made of it; bytes below which nobody asks whether
they are there."""
V = TypeVar("V")
Key = tuple[object, ...]
GONE = np.zeros(0)
"""The costs of a node that is gone: it has no strategies. Told by identity: `cost[v] is GONE`."""
GONE.flags.writeable = False


@dataclass(frozen=True, slots=True)
class Item:
    """A node loads rows lo <= r < hi with `amount[strategy]` (minimum 0: the constant part is in `Core.base`)."""

    lo: int
    hi: int
    amount: np.ndarray


class Core:
    """What presolve works on. `cost[v] is GONE` once v is gone; `adj[u][v]` is oriented u x v and
    `adj[v][u] is adj[u][v].T`. Rows are numbered: time points first, then the problem's own rows."""

    def __init__(self, limit: np.ndarray, price: np.ndarray) -> None:
        self.cost: list[np.ndarray] = []
        self.adj: list[dict[int, Table]] = []
        self.items: list[tuple[Item, ...]] = []
        self.limit, self.price = limit, price
        self.base = np.zeros(len(limit))
        self.constant = 0.0
        self.undo: list[Step] = []
        self.same: dict[bytes, np.ndarray] = {}  # equal index vectors are one object, like tables
        self.intern = Interner()
        self._memo: dict[Key, tuple[Any, Key]] = {}
        self._settled: dict[Key, Key] = {}

    def memo(self, compute: Callable[..., V], *args: object) -> V:
        """`compute(*args)`, run once for each distinct identity of the arguments (kept alive by the memo)."""
        key = (compute, *map(id, args))
        try:
            known: V = self._memo[key][0]
            return known
        except KeyError:
            found = compute(*args)
            self._memo[key] = found, args
            return found

    def memo_shaped(self, compute: Callable[..., V], shape: Key, *args: object) -> V:
        """`memo` for `compute(shape, *args)`, where `shape` is compared by value."""
        key = (compute, shape, *map(id, args))
        try:
            known: V = self._memo[key][0]
            return known
        except KeyError:
            found = compute(shape, *args)
            self._memo[key] = found, args
            return found

    def forget(self) -> None:
        """Drop what was kept to run each distinct operation once. Undoing needs none of it."""
        self._memo, self._settled, self.intern = {}, {}, Interner()

    def settle(self, v: int, rules: Key) -> None:
        """Note that `rules` find nothing to do at a node that looks like v. Copies in other layers look the same."""
        self._settled[self._look(v, rules)] = self.cost[v], *self.adj[v].values(), self.items[v]  # ids stay theirs

    def is_settled(self, v: int, rules: Key) -> bool:
        return self._look(v, rules) in self._settled

    def _look(self, v: int, rules: Key) -> Key:
        return (len(rules), id(self.cost[v]), *map(id, self.adj[v].values()), *((i.lo, i.hi, id(i.amount)) for i in self.items[v]))

    @property
    def alive(self) -> list[int]:
        return [v for v, c in enumerate(self.cost) if c is not GONE]

    def copy(self, own_memo: bool = False) -> "Core":
        """A second core that shares every immutable array and the memo; reductions of one leave the other alone.
        `own_memo`: what the copy computes is forgotten with it."""
        other = Core(self.limit.copy(), self.price.copy())
        other.cost, other.items = list(self.cost), list(self.items)
        other.adj = [dict(a) for a in self.adj]
        other.base, other.constant = self.base.copy(), self.constant
        other.undo = list(self.undo)
        other.remember(self, own_memo)
        return other

    def remember(self, other: "Core", own_memo: bool = False) -> None:
        """Share what `other` keeps to run each distinct operation once; see `copy` for `own_memo`."""
        self.same, self.intern = other.same, other.intern
        self._memo = dict(other._memo) if own_memo else other._memo
        self._settled = dict(other._settled) if own_memo else other._settled

    # -- small edits, all through shared immutable arrays ------------------------------------------------
    def add_cost(self, v: int, extra: np.ndarray) -> None:
        self.cost[v] = self.memo(np.add, self.cost[v], extra)

    def add_edge(self, u: int, v: int, table: Table) -> None:
        """Add a table oriented u x v; parallel edges add up."""
        old = self.adj[u].get(v)
        new = table if old is None else self.memo(_add_tables, old, table)
        self.adj[u][v], self.adj[v][u] = new, new.T

    def drop_edge(self, u: int, v: int) -> None:
        del self.adj[u][v], self.adj[v][u]

    def keep(self, v: int, kept: np.ndarray, change: np.ndarray | None = None) -> None:
        """Keep only the strategies `kept` (indices, ascending) of v. For `change` see `steps.Keep`."""
        kept = self.same.setdefault(kept.tobytes(), kept)
        self.undo.append(Keep(v, kept, len(self.cost[v]), change))
        self.cost[v] = self.memo(np.take, self.cost[v], kept)
        for u, table in self.adj[v].items():
            new = self.memo(_take_rows, table, kept)
            self.adj[v][u], self.adj[u][v] = new, new.T
        items, self.items[v] = self.items[v], ()
        for item in items:
            self.add_item(v, item.lo, item.hi, self.memo(np.take, item.amount, kept))

    def fix(self, v: int, s: int) -> None:
        """Decide v: its strategy s, its costs and loads, become part of the rest."""
        for u, table in self.adj[v].items():
            self.cost[u] = self.memo_shaped(_add_row, (s,), self.cost[u], table)
        for item in self.items[v]:
            self.base[item.lo:item.hi] += item.amount[s]
        self.constant += float(self.cost[v][s])
        self.undo.append(Fixed(v, s, self.memo_shaped(_only, (len(self.cost[v]), s))))
        self.remove(v)

    def add_item(self, v: int, lo: int, hi: int, amount: np.ndarray) -> None:
        least, rest, constant = self.memo(_split_constant, amount)
        if least:
            self.base[lo:hi] += least
        if constant:
            return
        same = [i for i in self.items[v] if i.lo == lo and i.hi == hi]
        if same:
            self.items[v] = tuple(i for i in self.items[v] if i is not same[0])
            self.add_item(v, lo, hi, self.memo(np.add, same[0].amount, rest))
        else:
            self.items[v] += (Item(lo, hi, rest),)

    def remove(self, v: int) -> None:
        """Forget v and its edges; the caller has moved its costs and items and recorded the undo."""
        for u in self.adj[v]:
            del self.adj[u][v]
        self.cost[v], self.adj[v], self.items[v] = GONE, {}, ()

    def lift(self, choice: np.ndarray, since: int = 0) -> np.ndarray:
        """Undo every reduction from number `since` of `undo` on: from a choice on the nodes alive (others ignored) to one on
        the nodes there were, by default on all."""
        full = np.array(choice, dtype=np.int64)
        for step in reversed(self.undo[since:]):
            step.lift(full)
        return full

    def widen(self, possible: dict[int, np.ndarray], room: float, since: int) -> dict[int, np.ndarray]:
        """Masks of the strategies that a choice may take that costs at most `room` more than the optimum, before the
        reductions from number `since` of `undo` on. `possible` has those of the nodes alive now. Rows must be gone."""
        masks = Masks(room, self.memo_shaped)
        for v, mask in possible.items():
            masks.put(v, mask)
        for step in reversed(self.undo[since:]):
            step.widen(masks)
        return masks.of

    def project(self, choice: np.ndarray) -> np.ndarray:
        """The other way, where it is defined: strategies that were removed become -1."""
        part = np.array(choice, dtype=np.int64)
        for step in self.undo:
            step.project(part)
        return part

    def price_rows(self, prices: np.ndarray) -> None:
        """Move priced loads into node costs: cost += prices . load, constant -= prices . (limit - base).
        With prices >= 0 (at most the row's own) the cost of a feasible choice never rises. Items are dropped, rows are slack."""
        total = np.concatenate([[0.0], np.cumsum(prices)])
        for v in self.alive:
            for item in self.items[v]:
                unit = total[item.hi] - total[item.lo]
                if unit:
                    self.cost[v] = self.memo_shaped(charge, (float(unit),), self.cost[v], item.amount)
            self.items[v] = ()
        on = prices > 0
        self.constant += float(np.dot(prices[on], (self.base - self.limit)[on]))
        self.price, self.limit = np.zeros_like(self.price), np.full_like(self.limit, np.inf)  # or one may be charged again


def charge(shape: tuple[float], cost: np.ndarray, amount: np.ndarray) -> np.ndarray:
    """cost + price x amount, the price being `shape[0]` (for `Core.memo_shaped`)."""
    return cost + shape[0] * amount


def _only(shape: tuple[int, int]) -> np.ndarray:
    """What each of `shape[0]` strategies costs more than number `shape[1]`, which is the only one there is."""
    return np.where(np.arange(shape[0]) == shape[1], 0.0, np.inf)


def _add_row(shape: tuple[int], cost: np.ndarray, table: Table) -> np.ndarray:
    return cost + table.a[shape[0]]


def _add_tables(a: Table, b: Table) -> Table:
    return Table(a.a + b.a)


def _take_rows(table: Table, kept: np.ndarray) -> Table:
    return table.take(kept)


def _split_constant(amount: np.ndarray) -> tuple[float, np.ndarray, bool]:
    least = float(amount.min())
    rest = amount - least if least else amount
    return least, rest, not rest.any()


def build(problem: Problem, like: Core | None = None) -> tuple[Core, np.ndarray]:
    """A Core of `problem` (an exact copy, nothing reduced), and the row of each of the problem's own rows. `like`: a core
    of much the same arrays, whose memo it shares.

    Raises ProblemError for an edge to an unknown node or index vectors of the wrong length, SearchSizeError where its tables would not fit into
    the memory that is free."""
    starts = _row_starts(problem)
    limit = np.concatenate([np.full(len(starts), problem.intervals.limit if problem.intervals else 0.0), problem.row_limit])
    price = np.concatenate([np.full(len(starts), np.inf), problem.row_price])
    core = Core(limit, price)
    if like is not None:
        core.remember(like)
    intern = core.intern
    core.cost = [intern(np.asarray(c, dtype=np.float64)) for c in problem.node_costs]
    core.adj = [{} for _ in core.cost]
    core.items = [()] * problem.n
    _add_items(core, problem, starts, intern)
    _add_edges(core, problem, intern)
    return core, np.arange(len(starts), len(limit))


class Interner:
    """Equal arrays become one object."""

    def __init__(self) -> None:
        self.seen: dict[Key, np.ndarray] = {}
        self.by_id: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __call__(self, a: np.ndarray) -> np.ndarray:
        found = self.by_id.get(id(a))
        if found is None:
            data = np.ascontiguousarray(a)
            same = self.seen.setdefault((data.shape, data.dtype.char, data.tobytes()), data)
            found = self.by_id[id(a)] = (same, a)  # keeps `a` alive, so that its id stays its own
        return found[0]


def _row_starts(problem: Problem) -> np.ndarray:
    """The largest load is reached right after some interval starts: those points are the rows."""
    if problem.intervals is None:
        return np.zeros(0, dtype=np.int64)
    live = problem.intervals.lo < problem.intervals.hi
    return np.unique(problem.intervals.lo[live])


def _add_items(core: Core, problem: Problem, starts: np.ndarray, intern: Interner) -> None:
    own, times = problem.items, problem.intervals
    node, strategy, amount = own.node, own.strategy, own.amount
    lo = own.row + len(starts)
    hi = lo + 1
    if times is not None:
        live = times.lo < times.hi
        node, strategy = np.concatenate([node, times.node[live]]), np.concatenate([strategy, times.strategy[live]])
        amount = np.concatenate([amount, times.amount[live]])
        lo = np.concatenate([lo, np.searchsorted(starts, times.lo[live])])
        hi = np.concatenate([hi, np.searchsorted(starts, times.hi[live])])
    if not len(node):
        return
    order = np.lexsort((strategy, hi, lo, node))
    node, strategy, lo, hi, amount = (x[order] for x in (node, strategy, lo, hi, amount))
    new = np.flatnonzero(np.concatenate([[True], (np.diff(node) != 0) | (np.diff(lo) != 0) | (np.diff(hi) != 0)]))
    for a, b in zip(new, np.append(new[1:], len(node)), strict=True):
        v = int(node[a])
        vector = np.zeros(len(core.cost[v]))
        np.add.at(vector, strategy[a:b], amount[a:b])
        core.add_item(v, int(lo[a]), int(hi[a]), intern(vector))


def _add_edges(core: Core, problem: Problem, intern: Interner) -> None:
    ends: list[list[np.ndarray]] = [[] for _ in core.cost]
    for edge in problem.edges:
        _check_edge(edge, core)
        ends[edge.u].append(intern(edge.rows))
        ends[edge.v].append(intern(edge.cols))
    index: dict[int, np.ndarray] = {}
    for v, vectors in enumerate(ends):
        kept = core.memo(_distinct, core.cost[v], *vectors, *(i.amount for i in core.items[v]))
        if kept is not None:
            index[v] = kept
            core.keep(v, kept)
    made: dict[Key, Table] = {}
    keys = [(id(e.table), id(e.rows), id(e.cols), id(index.get(e.u)), id(index.get(e.v))) for e in problem.edges]
    for edge, key in zip(problem.edges, keys, strict=True):
        if key not in made:
            made[key] = _restricted(core, edge, index.get(edge.u), index.get(edge.v))
    _check_memory(core, {id(t): t.size for t in made.values()})
    for edge, key in zip(problem.edges, keys, strict=True):
        core.add_edge(edge.u, edge.v, made[key])


def _check_memory(core: Core, entries: dict[int, int]) -> None:
    """Before tables become dense; `entries` of each."""
    needed = ENTRY_BYTES * sum(entries.values())
    if needed > LITTLE and needed > (free := free_memory()):
        raise SearchSizeError(f"the search needs about {needed / 1e9:.0f} GB for what pairs of strategies cost ({len(core.cost):,} nodes of up to "
                              f"{max(map(len, core.cost)):,} strategies), and {free / 1e9:.0f} GB are free; strategies multiply with mesh axes: "
                              f"give a mesh of fewer axes (a=2,b=4 as ab=8), or seeds, which leave fewer strategies")


def _restricted(core: Core, edge: Edge, u_kept: np.ndarray | None, v_kept: np.ndarray | None) -> Table:
    """The edge's dense table, of the strategies that its ends kept."""
    rows, cols = core.intern(edge.rows), core.intern(edge.cols)
    rows = rows if u_kept is None else core.memo(np.take, rows, u_kept)
    cols = cols if v_kept is None else core.memo(np.take, cols, v_kept)
    return core.memo(_dense, core.intern(edge.table), rows, cols)


def table_entries(core: Core) -> int:
    """Entries of all tables."""
    return sum(uses * t.size for t, uses in Counter(_tables(core)).items()) // 2  # few tables, many edges


def stored_entries(core: Core) -> int:
    """Entries of all tables, those that many edges share once."""
    return sum(t.size for t in set(_tables(core))) // 2  # and once as transposed


def _tables(core: Core) -> Iterator[Table]:
    """Of every edge, in both directions. Tables are told apart by identity."""
    return chain.from_iterable(tables.values() for tables in core.adj)


def connected(core: Core, start: int) -> list[int]:
    """The nodes that edges connect with `start`, nearest first."""
    seen, reached = {start}, [start]
    for v in reached:  # grows while it is walked
        new = [u for u in core.adj[v] if u not in seen]
        seen.update(new)
        reached += new
    return reached


def _check_edge(edge: Edge, core: Core) -> None:
    u, v, n = edge.u, edge.v, len(core.cost)
    if not (0 <= u < n and 0 <= v < n) or u == v:
        raise ProblemError(f"edge ({u}, {v}): nodes must be two different numbers from 0 to {n - 1}")
    if len(edge.rows) != len(core.cost[u]) or len(edge.cols) != len(core.cost[v]):
        raise ProblemError(f"edge ({u}, {v}): index vectors of length {len(edge.rows)} and {len(edge.cols)}, but the "
                           f"nodes have {len(core.cost[u])} and {len(core.cost[v])} strategies")


def _distinct(cost: np.ndarray, *vectors: np.ndarray) -> np.ndarray | None:
    """Strategies that no neighbour and no row can tell apart: keep the cheapest. None when all differ.

    This happens before tables become dense: on three mesh axes it decides what fits in memory."""
    if any(len(np.unique(vector)) == len(vector) for vector in vectors):
        return None
    order = np.lexsort((cost, *vectors)) if vectors else np.argsort(cost, kind="stable")
    same = np.ones(len(cost) - 1, dtype=bool)
    for vector in vectors:
        same &= vector[order[1:]] == vector[order[:-1]]
    first = np.concatenate([[True], ~same])
    return None if first.all() else np.sort(order[first])


def _dense(table: np.ndarray, rows: np.ndarray, cols: np.ndarray) -> Table:
    return Table(None, kinds=Kinds(np.asarray(table, dtype=np.float64), rows, cols))
