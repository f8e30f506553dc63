"""How reductions are taken back, in reverse order. Every step knows three ways:

lift      a choice of what is left becomes a choice of what there was
project   the other way, where it is defined: a strategy that was removed becomes -1
widen     strategies that a choice within `room` of the optimum may take: from what is left to what there was.
          Reductions keep *one* optimum; others that cost little more may use what was removed, and with rows they may
          be the better ones. Each step bounds what coming back costs. Only for cores without rows.

Masks of strategies are interned (`Masks`), so that equal layers are widened once."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Memo = Callable[..., Any]


@dataclass
class Masks:
    """`of[v]`: bool per strategy of v. Equal masks are one object, which is what `memo` needs."""

    room: float
    memo: Memo  # Core.memo_shaped
    of: dict[int, np.ndarray] = field(default_factory=dict)
    same: dict[bytes, np.ndarray] = field(default_factory=dict)

    def put(self, v: int, mask: np.ndarray) -> None:
        self.of[v] = self.same.setdefault(mask.tobytes(), mask)

    def run(self, v: int, compute: Callable, *args: Any) -> None:
        self.put(v, self.memo(compute, (self.room,), *args))


@dataclass(frozen=True, slots=True)
class Keep:
    """v kept the strategies `kept` of `size`. `change[a, b]`: the most that the b-th of them adds instead of the a-th
    other; None: the others were impossible."""

    v: int
    kept: np.ndarray
    size: int
    change: np.ndarray | None = None

    def lift(self, full: np.ndarray) -> None:
        full[self.v] = self.kept[full[self.v]]

    def project(self, part: np.ndarray) -> None:
        if part[self.v] >= 0:
            at = int(np.searchsorted(self.kept, part[self.v]))
            part[self.v] = at if at < len(self.kept) and self.kept[at] == part[self.v] else -1

    def widen(self, masks: Masks) -> None:
        if self.change is None:
            mask = np.zeros(self.size, dtype=bool)
            mask[self.kept] = masks.of[self.v]
            masks.put(self.v, mask)
        else:
            masks.run(self.v, _undominated_within, self.change, self.kept, masks.of[self.v])


def _undominated_within(shape: tuple, change: np.ndarray, kept: np.ndarray, alive: np.ndarray) -> np.ndarray:
    """A removed strategy comes back unless an impossible one is never dearer, or a possible one cheaper by more than room."""
    gone = np.ones(len(change) + len(kept), dtype=bool)
    gone[kept] = False
    mask = np.zeros(len(gone), dtype=bool)
    mask[kept] = alive
    mask[gone] = ~((change <= np.where(alive, np.nextafter(-shape[0], -np.inf), 0.0)).any(axis=1))
    return mask


@dataclass(frozen=True, slots=True)
class Fixed:
    """v stands alone: `extra[s]` is what s costs more than the best."""

    v: int
    best: int
    extra: np.ndarray

    def lift(self, full: np.ndarray) -> None:
        full[self.v] = self.best

    def project(self, part: np.ndarray) -> None:
        part[self.v] = 0

    def widen(self, masks: Masks) -> None:
        masks.put(self.v, self.extra <= masks.room)


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


def _given_one(shape: tuple, extra: np.ndarray, alive: np.ndarray) -> np.ndarray:
    return (extra[alive] <= shape[0]).any(axis=0)


@dataclass(frozen=True, slots=True)
class GivenTwo:
    """v is `best[choice of u, choice of w]`, the least of to_u[s, a] + cost[s] + to_w[s, b], which are `parts`."""

    v: int
    u: int
    w: int
    best: np.ndarray
    parts: tuple

    def lift(self, full: np.ndarray) -> None:
        full[self.v] = self.best[full[self.u], full[self.w]]

    def project(self, part: np.ndarray) -> None:
        return

    def widen(self, masks: Masks) -> None:
        masks.run(self.v, _given_two, *self.parts, masks.of[self.u], masks.of[self.w])


def _given_two(shape: tuple, to_u: np.ndarray, cost: np.ndarray, to_w: np.ndarray, alive_u: np.ndarray,
               alive_w: np.ndarray) -> np.ndarray:
    left, right = to_u[:, alive_u] + cost[:, None], to_w[:, alive_w]
    least = np.full((left.shape[1], right.shape[1]), np.inf)
    for a, b in zip(left, right, strict=True):  # one strategy at a time, so that no cube is ever stored
        np.minimum(least, a[:, None] + b[None, :], out=least)
    least = np.where(np.isfinite(least), least + shape[0], -np.inf)
    return np.array([(a[:, None] + b[None, :] <= least).any() for a, b in zip(left, right, strict=True)], dtype=bool)


@dataclass(frozen=True, slots=True)
class States:
    """Strategies of v were merged: `best[state, choice of u]` is the one a state stands for, `group` the state of each.
    `dearer` = (costs to u before, their shift per strategy, costs after)."""

    v: int
    u: int
    best: np.ndarray
    group: np.ndarray
    dearer: tuple

    def lift(self, full: np.ndarray) -> None:
        full[self.v] = self.best[full[self.v], full[self.u]]

    def project(self, part: np.ndarray) -> None:
        if part[self.v] >= 0:
            part[self.v] = self.group[part[self.v]]

    def widen(self, masks: Masks) -> None:
        masks.run(self.v, _states, *self.dearer, self.group, masks.of[self.v], masks.of[self.u])


def _states(shape: tuple, before: np.ndarray, shift: np.ndarray, after: np.ndarray, group: np.ndarray, alive_v: np.ndarray,
            alive_u: np.ndarray) -> np.ndarray:
    each = before[:, alive_u] + shift[:, None]
    close = (each <= after[group][:, alive_u] + shape[0]) & np.isfinite(each)
    return alive_v[group] & close.any(axis=1)


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
        masks.put(self.u, joint.any(axis=1))
        masks.put(self.v, joint.any(axis=0))


Undo = Keep | Fixed | GivenOne | GivenTwo | States | Pair
