"""Bounds of problems that are too large to be made dense: tables stay as they are given, between kinds of strategies (`Edge.rows`, `Edge.cols`).

Nothing is presolved but what has no partner. Problems have no rows here."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.search.dual import messages
from autoshard.search.dual.dual import affordable, grid_of
from autoshard.search.dual.packed import Packed
from autoshard.search.problem import Edge, Problem, one_after_other
from autoshard.search.reductions import Infeasible


def with_partners(costs: Sequence[np.ndarray], edges: Sequence[Edge]) -> list[np.ndarray]:
    """Per node the strategies that have one on every edge, after all others are gone. Raises Infeasible where none is left."""
    alive = [np.isfinite(cost) for cost in costs]
    at: list[list[int]] = [[] for _ in costs]
    for i, e in enumerate(edges):
        at[e.u].append(i)
        at[e.v].append(i)
    finite = {id(e.table): np.isfinite(e.table) for e in edges}
    todo = {i: None for i, e in enumerate(edges) if not finite[id(e.table)].all()}
    while todo:
        i, _ = todo.popitem()
        e = edges[i]
        able = finite[id(e.table)]
        here, there = np.zeros(len(able), bool), np.zeros(able.shape[1], bool)
        here[e.rows[alive[e.u]]] = True
        there[e.cols[alive[e.v]]] = True
        for node, partnered in ((e.u, able[:, there].any(axis=1)[e.rows]), (e.v, able[here].any(axis=0)[e.cols])):
            left = alive[node] & partnered
            if not left.any():
                raise Infeasible(node)
            if left.sum() < alive[node].sum():
                alive[node] = left
                todo.update((j, None) for j in at[node] if not finite[id(edges[j].table)].all())
    return [np.flatnonzero(a) for a in alive]


class Sweeps:
    """Messages on the edges of a problem without rows; `start` from those of a problem with the same nodes and edges."""

    def __init__(self, problem: Problem, start: Sweeps | None = None) -> None:
        self.packed = pack(problem)
        p = self.packed
        size = int(np.dot(np.diff(p.start), np.diff(p.adj_ptr)))
        self.message: np.ndarray = np.zeros(size) if start is None else start.message
        self._before, self._pace = np.zeros(size), np.array([0.0, -np.inf])  # of `sweep_ahead`
        self._grid = grid_of(p)
        self.bound = -np.inf

    def run(self, count: int) -> None:
        """So many sweeps, forward and backward; `bound` is then the highest proven so far."""
        p, theta = self.packed, np.empty_like(self.packed.cost)
        messages.sweep_ahead(p, self.message, self._before, self._pace, theta, count)
        messages.sweep(p, p.cost, self.message, theta, False)
        self.bound = max(self.bound, float(messages.decouple(p, p.cost, self.message.copy(), self._grid)))

    def possible(self, room: float) -> list[np.ndarray]:
        """Per node the strategies that a choice may take which costs at most `room` more than `bound`."""
        p = self.packed
        return [np.flatnonzero(part) for part in np.split(affordable(p, self.message, self.bound + room), p.start[1:-1])]

    def choice(self) -> np.ndarray:
        out = np.zeros(len(self.packed.start) - 1, dtype=np.int64)
        messages.decode(self.packed, self.packed.cost, self.message, out)
        return out

    def cost(self, choice: np.ndarray) -> float:
        return float(messages.total_cost(self.packed, choice))


def pack(problem: Problem) -> Packed:
    """The problem's own tables as flat arrays; see `Packed`. Of an edge whose strategies are all of different kinds these are in order: the loops
    take such a table as it is."""
    tables: list[np.ndarray] = []
    kinds: list[np.ndarray] = []
    known: dict[tuple[int, int, int], int] = {}
    ends: list[list[tuple[int, int, int]]] = [[] for _ in range(problem.n)]
    first: list[int] = []  # per edge where its table is, and the kinds of its rows; behind each the other way around
    for i, e in enumerate(problem.edges):
        key = id(e.table), id(e.rows), id(e.cols)
        if key not in known:
            of_kinds, rows, cols = _in_order(e)
            known[key] = len(tables)
            tables += [of_kinds, of_kinds.T]
            kinds += [rows, cols]
        first.append(known[key])
        ends[e.u].append((e.v, i, 0))
        ends[e.v].append((e.u, i, 1))
    order = [end for v in range(problem.n) for end in sorted(ends[v])]
    sizes = problem.flat_nodes.size
    place = {(i, side): at for at, (_, i, side) in enumerate(order)}
    length = np.repeat(sizes, [len(found) for found in ends])
    which = np.array([first[i] + side for _, i, side in order], dtype=np.int64)
    (where, table), (kind, every) = one_after_other([t.ravel() for t in tables]), one_after_other(kinds)
    count = np.array([len(t) for t in tables], dtype=np.int64)
    none, empty = np.zeros(0), np.zeros(0, dtype=np.int64)
    return Packed(
        start=_cumulated(sizes), adj_ptr=_cumulated([len(found) for found in ends]), adj_node=np.array([w for w, _, _ in order], dtype=np.int64),
        adj_table=where[which], adj_message=_cumulated(length)[:-1], adj_back=np.array([place[i, 1 - side] for _, i, side in order], dtype=np.int64),
        adj_kind=kind[which], adj_kinds=count[which], kind=every.astype(np.int64), table=table, cost=np.concatenate(problem.node_costs),
        item_ptr=np.zeros(problem.n + 1, dtype=np.int64), item_lo=empty, item_hi=empty, item_amount=empty, amount=none, slack=none, price=none,
        scale=none)


def _in_order(e: Edge) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The table and the kinds of its two sides, without kinds that no strategy is of."""
    (used, rows), (there, cols) = (_kinds(index) for index in (e.rows, e.cols))
    return e.table[np.ix_(used, there)], rows, cols


def _kinds(index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(what is in the index, per strategy where): in the order of strategies where all differ."""
    used, where = np.unique(index, return_inverse=True)
    return (index, np.arange(len(index))) if len(used) == len(index) else (used, where)


def _cumulated(counts: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
