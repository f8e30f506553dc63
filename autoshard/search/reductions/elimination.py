"""Nodes that load no row and have at most two neighbours are minimised out; single strategies are folded in.

Example: v with costs [1, 2] and one edge [[0, 5], [9, 0]] (u x v): u pays min(0+1, 5+2) = 1 or min(9+1, 0+2) = 2."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoshard.search.reductions.core import Core
from autoshard.search.reductions.steps import Fixed, Masks
from autoshard.search.reductions.table import Table

LARGEST_PRODUCT = 30_000_000  # strategies of the three nodes multiplied; above this degree two is left alone
LARGEST_TABLE = 250_000


def eliminate(core: Core, v: int) -> bool:
    if len(core.cost[v]) == 1:
        return _fold_single(core, v)
    degree = len(core.adj[v])
    if core.items[v] or degree > 2:
        return False
    if degree == 0:
        return _fix_isolated(core, v)
    return _fold_leaf(core, v) if degree == 1 else _fold_between(core, v)


def _fold_single(core: Core, v: int) -> bool:
    for u, table in core.adj[v].items():
        core.add_cost(u, core.memo(first_row, table))
    core.constant += float(core.cost[v][0])
    core.remove(v)
    core.undo.append(Fixed(v, 0, np.zeros(1)))
    return True


def first_row(table: Table) -> np.ndarray:
    return table.a[0]


def _fix_isolated(core: Core, v: int) -> bool:
    best = int(np.argmin(core.cost[v]))
    core.constant += float(core.cost[v][best])
    core.undo.append(Fixed(v, best, core.cost[v] - core.cost[v][best]))
    core.remove(v)
    return True


def _fold_leaf(core: Core, v: int) -> bool:
    (u, table), = core.adj[v].items()
    cost, best, extra = core.memo(fold, core.cost[v], table)
    core.remove(v)
    core.add_cost(u, cost)
    core.undo.append(GivenOne(v, u, best, extra))
    return True


def fold(cost: np.ndarray, table: Table) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(least cost, strategy of v that has it, what every strategy of v costs more) for each strategy of its neighbour."""
    total = table.T.a + cost
    best = np.argmin(total, axis=1)
    least = total[np.arange(len(total)), best]
    return least, best, np.where(np.isfinite(total), total - least[:, None], np.inf)


def _fold_between(core: Core, v: int) -> bool:
    (u, to_u), (w, to_w) = core.adj[v].items()
    nu, nv, nw = to_u.a.shape[1], len(core.cost[v]), to_w.a.shape[1]
    if nu * nv * nw > LARGEST_PRODUCT or nu * nw > max(LARGEST_TABLE, nv * (nu + nw)):
        return False
    cost = core.cost[v]
    table, best = core.memo(join, to_u, cost, to_w)
    core.remove(v)
    core.add_edge(u, w, table)
    core.undo.append(GivenTwo(v, u, w, best, (to_u.a, cost, to_w.a)))
    return True


def join(to_u: Table, cost: np.ndarray, to_w: Table) -> tuple[Table, np.ndarray]:
    """min over s of to_u[s, a] + cost[s] + to_w[s, b], one s at a time so that no cube is ever stored."""
    left, right = to_u.a + cost[:, None], to_w.a
    out = left[0][:, None] + right[0][None, :]
    best = np.zeros(out.shape, dtype=np.int16 if len(cost) < 2**15 else np.int32)
    for s in range(1, len(cost)):
        candidate = left[s][:, None] + right[s][None, :]
        better = candidate < out
        out[better] = candidate[better]
        best[better] = s
    return Table(out), best


@dataclass(frozen=True, slots=True)
class GivenOne:
    """v is `best[choice of u]`; `extra[choice of u, s]` is what s costs more than that."""

    v: int
    u: int
    best: np.ndarray
    extra: np.ndarray

    def lift(self, full: np.ndarray) -> None:
        full[self.v] = self.best[full[self.u]]

    def project(self, part: np.ndarray) -> None:
        return

    def widen(self, masks: Masks) -> None:
        masks.run(self.v, _given_one, self.extra, masks.of[self.u])


def _given_one(shape: tuple[float], extra: np.ndarray, alive: np.ndarray) -> np.ndarray:
    return (extra[alive] <= shape[0]).any(axis=0)


@dataclass(frozen=True, slots=True)
class GivenTwo:
    """v is `best[choice of u, choice of w]`, the least of to_u[s, a] + cost[s] + to_w[s, b], which are `parts`."""

    v: int
    u: int
    w: int
    best: np.ndarray
    parts: tuple[np.ndarray, np.ndarray, np.ndarray]

    def lift(self, full: np.ndarray) -> None:
        full[self.v] = self.best[full[self.u], full[self.w]]

    def project(self, part: np.ndarray) -> None:
        return

    def widen(self, masks: Masks) -> None:
        masks.run(self.v, _given_two, *self.parts, masks.of[self.u], masks.of[self.w])


def _given_two(shape: tuple[float], to_u: np.ndarray, cost: np.ndarray, to_w: np.ndarray, alive_u: np.ndarray,
               alive_w: np.ndarray) -> np.ndarray:
    left, right = to_u[:, alive_u] + cost[:, None], to_w[:, alive_w]
    least = np.full((left.shape[1], right.shape[1]), np.inf)
    for a, b in zip(left, right, strict=True):  # one strategy at a time, so that no cube is ever stored
        np.minimum(least, a[:, None] + b[None, :], out=least)
    least = np.where(np.isfinite(least), least + shape[0], -np.inf)
    return np.array([(a[:, None] + b[None, :] <= least).any() for a, b in zip(left, right, strict=True)], dtype=bool)
