"""A core as flat arrays for the compiled loops. Equal tables are stored once, and of equal rows and columns of a table one, so most of it stays in
cache."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autoshard.search.reductions.core import Core, connected
from autoshard.search.reductions.dominance import distinct
from autoshard.search.reductions.rows import most_load

WALKS = 3  # each from where the last one ended: then it starts at an end
FEW_ENTRIES = 512  # of a table; below, to look for equal rows takes longer than it saves
REPEATED = 0.5  # of the entries, which equal rows and columns must leave at most


class Packed(NamedTuple):
    """Nodes 0..n-1 are the core's alive nodes in order. For adjacency entry a of node v: `adj_node[a]` the neighbour,
    `table[adj_table[a]:]` the costs, v-major, `adj_message[a]` where the message into v starts, `adj_back[a]` the
    neighbour's entry for v. The neighbour tells `adj_kinds[a]` kinds of v's strategies apart: strategy s is of kind `kind[adj_kind[a] + s]`, and the
    table has a row for each kind, and a column for each that v tells apart of the neighbour's. Packed plainly, every strategy is its own kind.
    Items of node v: `item_ptr[v]:item_ptr[v+1]`. `slack` = limit - base of each row; `scale` makes rows of different units (bytes, seconds)
    comparable."""

    start: np.ndarray
    adj_ptr: np.ndarray
    adj_node: np.ndarray
    adj_table: np.ndarray
    adj_message: np.ndarray
    adj_back: np.ndarray
    adj_kind: np.ndarray
    adj_kinds: np.ndarray
    kind: np.ndarray
    table: np.ndarray
    cost: np.ndarray
    item_ptr: np.ndarray
    item_lo: np.ndarray
    item_hi: np.ndarray
    item_amount: np.ndarray
    amount: np.ndarray
    slack: np.ndarray
    price: np.ndarray
    scale: np.ndarray


def along(core: Core) -> list[int]:
    """The nodes by how far they are from one at an end: sweeps in this order carry what they know through all layers. In half
    as many sweeps as in the order of ops, whose copies come last, the untied 8B problem at its best prices is exact."""
    order: list[int] = []
    seen: set[int] = set()
    for start in core.alive:
        if start not in seen:
            reached = connected(core, start)
            for _ in range(1, WALKS):
                reached = connected(core, reached[-1])
            seen.update(reached)
            order += reached
    return order


def pack(core: Core, nodes: list[int] | None = None, alike: bool = False) -> tuple[Packed, np.ndarray, np.ndarray]:
    """(arrays, core node of each packed node, core row of each packed row). Of the rows that see the same items, and
    of neighbours of which one is always at least as full, only the tightest is kept. `nodes`: those alive in the order of sweeps. `alike`: whether
    equal rows and columns of tables are stored once."""
    nodes = core.alive if nodes is None else nodes
    number = {v: i for i, v in enumerate(nodes)}
    start = np.concatenate([[0], np.cumsum([len(core.cost[v]) for v in nodes])]).astype(np.int64)
    kept = _needed_rows(core, nodes)
    rows = np.flatnonzero(kept)
    row_of = np.concatenate([[0], np.cumsum(kept)])
    slack = core.limit[rows] - core.base[rows]
    slack += 1e-12 * np.maximum(np.abs(core.limit[rows]), 1.0) * (slack != np.rint(slack))
    cost = np.concatenate([core.cost[v] for v in nodes]) if nodes else np.zeros(0)
    packed = Packed(start, *_pack_edges(core, nodes, number, alike), cost, *_pack_items(core, nodes, row_of), slack, core.price[rows],
                    _scales(core, slack, rows))
    return packed, np.array(nodes, dtype=np.int64), rows


def _scales(core: Core, slack: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """One scale for all hard rows, which share a unit; a priced row's is the most it can be loaded."""
    hard = np.isinf(core.price[rows])
    common = float(np.abs(slack[hard]).max(initial=0.0)) or 1.0
    most = np.maximum(most_load(core)[rows] - core.base[rows], 1e-300) if len(rows) else slack
    return np.where(hard, common, most)


def _needed_rows(core: Core, nodes: list[int]) -> np.ndarray:
    """Mask of rows that decide. Row r+1 sees all of r's items when none ends in between, and is then as full."""
    count = len(core.limit)
    begins, ends = np.zeros(count + 1, dtype=np.int64), np.zeros(count + 1, dtype=np.int64)
    for v in nodes:
        for item in core.items[v]:
            begins[item.lo] += 1
            ends[item.hi] += 1
    touched = np.cumsum(begins - ends)[:-1] > 0
    slack = core.limit - core.base
    kept: list[int] = []
    free = np.isinf(core.price)  # a priced row is kept: it is not about fitting
    since_end = np.cumsum(ends)
    since_begin = np.cumsum(begins)
    for r in np.flatnonzero(touched).tolist():
        while kept and free[r] and free[kept[-1]] and since_end[r] == since_end[kept[-1]] and slack[kept[-1]] >= slack[r]:
            kept.pop()
        covered = kept and free[r] and free[kept[-1]] and since_begin[r] == since_begin[kept[-1]] and slack[kept[-1]] <= slack[r]
        if not covered:
            kept.append(r)
    mask = np.zeros(count, dtype=bool)
    mask[kept] = True
    return mask


Array = np.ndarray


def _pack_edges(core: Core, nodes: list[int], number: dict[int, int],
                alike: bool) -> tuple[Array, Array, Array, Array, Array, Array, Array, Array, Array]:
    pointer = [0]
    neighbour: list[int] = []
    message: list[int] = []
    position: dict[tuple[int, int], int] = {}
    tables, kinds = _Flat(), _Flat()
    every = np.arange(max((len(core.cost[v]) for v in nodes), default=0))
    placed: dict[int, tuple[int, int, int]] = {}  # of tables: where they are, where the kinds of their rows, and how many of these
    places: list[tuple[int, int, int]] = []
    total = 0
    for v in nodes:
        for u in sorted(core.adj[v]):
            table = core.adj[v][u]
            if id(table) not in placed:
                kept = (table.fact(_kinds) if alike else None) or _Kinds(table.a, every)
                placed[id(table)] = tables.place(table.a, kept.table), kinds.place(kept.row, kept.row), len(kept.table)
            places.append(placed[id(table)])
            position[v, u] = len(neighbour)
            neighbour.append(number[u])
            message.append(total)
            total += len(core.cost[v])
        pointer.append(len(neighbour))
    where, kind, count = np.array(places, dtype=np.int64).reshape(-1, 3).T.copy()
    back = [position[u, v] for v in nodes for u in sorted(core.adj[v])]
    return (_ints(pointer), _ints(neighbour), where, _ints(message), _ints(back), kind, count, kinds.joined(np.int64), tables.joined(np.float64))


class _Flat:
    """Arrays one after the other, each object's once."""

    def __init__(self) -> None:
        self.offsets: dict[int, int] = {}
        self.parts: list[np.ndarray] = []
        self.size = 0

    def place(self, of: object, array: np.ndarray) -> int:
        """Where the array of an object starts."""
        if id(of) not in self.offsets:
            self.offsets[id(of)] = self.size
            self.parts.append(array.ravel())
            self.size += array.size
        return self.offsets[id(of)]

    def joined(self, dtype: type) -> np.ndarray:
        return np.concatenate(self.parts) if self.parts else np.zeros(0, dtype=dtype)


class _Kinds(NamedTuple):
    """A table with equal rows and equal columns once: `row` has the kind of each row."""

    table: np.ndarray
    row: np.ndarray


def _kinds(table: np.ndarray) -> _Kinds | None:
    """None where few rows and columns are equal."""
    if table.size < FEW_ENTRIES:
        return None
    rows, row = distinct(table)
    columns, _ = distinct(np.ascontiguousarray(table[rows].T))
    if len(rows) * len(columns) > REPEATED * table.size:
        return None
    return _Kinds(np.ascontiguousarray(table[np.ix_(rows, columns)]), row)


def _ints(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def _pack_items(core: Core, nodes: list[int], row_of: np.ndarray) -> tuple[Array, Array, Array, Array, Array]:
    pointer = [0]
    lo: list[int] = []
    hi: list[int] = []
    where: list[int] = []
    offsets: dict[int, int] = {}
    amounts: list[np.ndarray] = []
    size = 0
    for v in nodes:
        for item in core.items[v]:
            if id(item.amount) not in offsets:
                offsets[id(item.amount)] = size
                amounts.append(item.amount)
                size += len(item.amount)
            lo.append(int(row_of[item.lo]))
            hi.append(int(row_of[item.hi]))
            where.append(offsets[id(item.amount)])
        pointer.append(len(lo))
    flat = np.concatenate(amounts) if amounts else np.zeros(0)
    return _ints(pointer), _ints(lo), _ints(hi), _ints(where), flat
