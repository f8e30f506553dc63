"""The inner search problem and its answer. Knows numpy only.

    minimise  sum_n cost_n[s_n] + sum_(u,v) table_uv[s_u, s_v] + sum_r price_r * max(0, load_r - limit_r)
    where     load_r = sum of the amounts of items (n, s, r, amount) with s == s_n,
    and a row with infinite price is hard: load_r <= limit_r.

Infinite costs (np.inf) forbid a choice or a pair.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np

from autoshard.errors import ProblemError

MANY = 3000  # nodes of a problem whose search takes tens of seconds


@dataclass(frozen=True, eq=False)
class Edge:
    """Cost of a pair of choices: `table[rows[s_u], cols[s_v]]`. Tables and index vectors are shared
    between edges (interned), so dense per-edge matrices exist only after presolve."""

    u: int
    v: int
    table: np.ndarray
    rows: np.ndarray
    cols: np.ndarray

    def dense(self) -> np.ndarray:
        return self.table[np.ix_(self.rows, self.cols)]


@dataclass(frozen=True, eq=False)
class Items:
    """Parallel arrays: strategy `strategy[i]` of node `node[i]` puts `amount[i]` on row `row[i]`."""

    node: np.ndarray
    strategy: np.ndarray
    row: np.ndarray
    amount: np.ndarray

    @staticmethod
    def empty() -> "Items":
        return Items(*(np.zeros(0, dtype=np.int64),) * 3, np.zeros(0))


@dataclass(frozen=True, eq=False)
class Problem:
    """Nodes with a cost vector each, edges, and items on rows.

    node_costs   one float64 (or int64) array per node
    edges        see Edge; several edges between the same pair add up
    row_limit    limit per row; row_price: cost per unit of excess, inf = hard
    items        usage
    intervals    the contest's form of hard memory rows, kept implicit: per item (lo, hi, amount) half open
                 time intervals under `usage_limit`; rows for time points are made lazily. May be None.
    groups       optional per node: nodes with equal id >= 0 are copies of each other in repeated layers
                 (same strategy count and cost vector); -1 = free. A hint, never a constraint.
    names        optional, for messages
    """

    node_costs: tuple[np.ndarray, ...]
    edges: tuple[Edge, ...] = ()
    row_limit: np.ndarray = field(default_factory=lambda: np.zeros(0))
    row_price: np.ndarray = field(default_factory=lambda: np.zeros(0))
    items: Items = field(default_factory=Items.empty)
    intervals: "Intervals | None" = None
    groups: np.ndarray | None = None
    names: tuple[str, ...] = ()
    _flat: dict[int, tuple[object, Any]] = field(default_factory=dict, repr=False)
    """`FlatNodes` and `FlatEdges` by what they are of: those of a problem with other limits of rows are the same."""

    @property
    def n(self) -> int:
        return len(self.node_costs)

    @property
    def is_large(self) -> bool:
        """Whether a search takes so long that one which others follow may end far from the optimum."""
        return self.n > MANY

    @cached_property
    def key(self) -> str:
        """Equal for problems with the same numbers, whatever their names. Items on rows that no choice can fill are left out: they decide nothing."""
        digest, flat = blake2b(digest_size=16), self.flat_edges
        digest.update(_said(self.node_costs) + flat.u.tobytes() + flat.v.tobytes())
        for arrays in ([e.table for e in self.edges], [e.rows for e in self.edges], [e.cols for e in self.edges]):
            digest.update(_said(arrays))
        binds = ~np.isinf(self.row_price) | self.fillable
        kept = binds[self.items.row]
        rest = (np.where(binds, self.row_limit, np.inf), self.row_price, *(x[kept] for x in (self.items.node, self.items.strategy, self.items.row,
                                                                                            self.items.amount)))
        for array in rest:
            digest.update(array.tobytes())
        return digest.hexdigest() if self.intervals is None else f"{id(self)}"

    @property
    def fillable(self) -> np.ndarray:
        """Per row, whether its items together are more than its limit."""
        return np.bincount(self.items.row, np.maximum(self.items.amount, 0.0), minlength=len(self.row_limit)) > self.row_limit

    @property
    def flat_nodes(self) -> "FlatNodes":
        if id(self.node_costs) not in self._flat:
            sizes = np.fromiter(map(len, self.node_costs), dtype=np.int64, count=self.n)
            self._flat[id(self.node_costs)] = self.node_costs, FlatNodes(*one_after_other(self.node_costs), sizes)
        return self._flat[id(self.node_costs)][1]

    @property
    def flat_edges(self) -> "FlatEdges":
        if id(self.edges) not in self._flat:
            self._flat[id(self.edges)] = self.edges, self._flattened()
        return self._flat[id(self.edges)][1]

    def _flattened(self) -> "FlatEdges":
        tables, values = one_after_other([e.table.ravel() for e in self.edges], [id(e.table) for e in self.edges])
        rows, index_u = one_after_other([e.rows for e in self.edges])
        cols, index_v = one_after_other([e.cols for e in self.edges])
        u, v, width = np.array([(e.u, e.v, e.table.shape[1]) for e in self.edges], dtype=np.int64).reshape(-1, 3).T
        return FlatEdges(u, v, width, tables, rows, cols, values, index_u, index_v)


@dataclass(frozen=True, eq=False)
class FlatNodes:
    """All cost vectors one after the other, shared ones once: those of node n start at `start[n]`, and there are `size[n]`."""

    start: np.ndarray
    values: np.ndarray
    size: np.ndarray

    def of(self, choice: np.ndarray) -> list[float]:
        """The cost of every node's choice."""
        return self.values[self.start + choice].tolist()


@dataclass(frozen=True, eq=False)
class FlatEdges:
    """All tables one after the other, shared ones once, and all index vectors. Per edge: its ends, the width of its table,
    where the table and the index vectors start."""

    u: np.ndarray
    v: np.ndarray
    width: np.ndarray
    table: np.ndarray
    rows: np.ndarray
    cols: np.ndarray
    values: np.ndarray
    index_u: np.ndarray
    index_v: np.ndarray

    def of(self, choice: np.ndarray) -> list[float]:
        """The cost of every edge's pair of choices."""
        row, col = self.index_u[self.rows + choice[self.u]], self.index_v[self.cols + choice[self.v]]
        return self.values[self.table + row * self.width + col].tolist()


def _said(arrays: Sequence[np.ndarray]) -> bytes:
    """Digests of the arrays, one after the other. Shared arrays are many times more than distinct ones."""
    _, first, which = np.unique(np.fromiter(map(id, arrays), dtype=np.int64, count=len(arrays)), return_index=True, return_inverse=True)
    said = [blake2b(np.ascontiguousarray(arrays[i]).tobytes() + str(arrays[i].shape).encode(), digest_size=16).digest() for i in first.tolist()]
    return np.frombuffer(b"".join(said), dtype="V16")[which].tobytes() if said else b""


def one_after_other(arrays: Sequence[np.ndarray], keys: Sequence[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(where each array starts, all of them one after the other); an object that comes again is there once."""
    seen: dict[int, int] = {}
    parts, starts, size = [], [], 0
    for array, key in zip(arrays, keys or map(id, arrays), strict=True):
        if key not in seen:
            seen[key] = size
            parts.append(array)
            size += len(array)
        starts.append(seen[key])
    return np.array(starts, dtype=np.int64), np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Intervals:
    """Usage `amount[i]` of strategy `strategy[i]` of node `node[i]` during [lo[i], hi[i])."""

    limit: float
    node: np.ndarray
    strategy: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    amount: np.ndarray


class Status(Enum):
    """The value is what a user reads. `TIME_LIMIT` and `WORK_LIMIT` say that a limit decided; with `GAP` the engine had
    tried all it knows, or the gap was small enough. `OPTIMAL_TIED` keeps the bound of the untied problem, so that its gap may be above zero."""

    OPTIMAL = "optimal"
    OPTIMAL_TIED = "optimal among tied plans"
    TIME_LIMIT = "best found within the time limit"
    WORK_LIMIT = "best found within the work limit"
    GAP = "best found; a gap is left"
    INTERRUPTED = "best found before it was interrupted"
    INFEASIBLE = "no feasible choice exists"
    UNKNOWN = "no feasible choice found, nor proven impossible"


@dataclass(frozen=True, eq=False)
class Solution:
    """One strategy per node, its exact cost, and a valid lower bound on the best cost.

    `choice` is None when nothing feasible was found. `gap` = (cost - bound) / |cost|, 0 when proven. `near`: choices met
    at row prices near the best; they need not fit."""

    choice: np.ndarray | None
    cost: float
    bound: float
    status: Status
    seconds: float
    stats: dict[str, Any] = field(default_factory=dict)
    near: tuple[np.ndarray, ...] = ()

    @property
    def gap(self) -> float:
        if self.choice is None:
            return float("inf")
        return max(0.0, self.cost - self.bound) / max(abs(self.cost), 1e-30)


def evaluate(problem: Problem, choice: np.ndarray) -> float:
    """Cost of a choice, +inf when it is infeasible. The sum is correctly rounded, so whole numbers below 2**53
    are exact. Raises ProblemError for a choice of the wrong length or a strategy that does not exist."""
    choice = np.asarray(choice)
    if len(choice) != problem.n:
        raise ProblemError(f"a choice for {problem.n} nodes is needed, got {len(choice)} entries")
    sizes = problem.flat_nodes.size
    if np.any((choice < 0) | (choice >= sizes)):
        at = int(np.flatnonzero((choice < 0) | (choice >= sizes))[0])
        raise ProblemError(f"node {at} has strategies 0 to {sizes[at] - 1}, the choice says {choice[at]}")
    total = _without_rows(problem, choice)
    load = row_loads(problem, choice)
    excess = np.maximum(0.0, load - problem.row_limit)
    hard = np.isinf(problem.row_price)
    tolerance = 1e-9 * np.maximum(1.0, np.abs(problem.row_limit))
    if np.any(excess[hard] > tolerance[hard]) or not _intervals_fit(problem.intervals, choice):
        return float("inf")
    return total + float(np.sum(excess[~hard] * problem.row_price[~hard]))


def _without_rows(problem: Problem, choice: np.ndarray) -> float:
    return math.fsum([*problem.flat_nodes.of(choice), *problem.flat_edges.of(choice)])


def priced_cost(problem: Problem, choice: np.ndarray, prices: np.ndarray) -> float:
    """Cost of a choice when row r costs prices[r] x (load - limit), negative where there is room, and nothing else."""
    return _without_rows(problem, choice) + float(np.dot(prices, row_loads(problem, choice) - problem.row_limit))


def distinct(choices: Iterable[np.ndarray]) -> list[np.ndarray]:
    """Each choice once, where it comes first."""
    return list({choice.tobytes(): choice for choice in choices}.values())


@dataclass(frozen=True, eq=False)
class Seen:
    """A choice as rows see it: its `cost` without rows, and its `loads`. Problems with the same rows know this of each other, whatever their
    nodes."""

    cost: float
    loads: np.ndarray


def seen(problem: Problem, choices: Iterable[np.ndarray]) -> tuple[Seen, ...]:
    return tuple(Seen(_without_rows(problem, choice), row_loads(problem, choice)) for choice in choices)


def row_loads(problem: Problem, choice: np.ndarray) -> np.ndarray:
    items, load = problem.items, np.zeros(len(problem.row_limit))
    if len(items.node):
        chosen = choice[items.node] == items.strategy
        np.add.at(load, items.row[chosen], items.amount[chosen])
    return load


def _intervals_fit(intervals: Intervals | None, choice: np.ndarray) -> bool:
    if intervals is None or not len(intervals.node):
        return True
    on = (choice[intervals.node] == intervals.strategy) & (intervals.lo < intervals.hi)
    times = np.concatenate([intervals.lo[on], intervals.hi[on]])
    deltas = np.concatenate([intervals.amount[on], -intervals.amount[on]])
    order = np.lexsort((deltas, times))  # at equal times, frees first: intervals are half open
    return bool(np.all(np.cumsum(deltas[order]) <= intervals.limit)) if len(order) else True
