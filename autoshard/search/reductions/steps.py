"""What a reduction leaves behind, so that it can be taken back: a `Step`. The file of a reduction has its step beside it; those
here are made by `Core` itself.

Masks of strategies are interned (`Masks`), so that equal layers are widened once."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

Memo = Callable[..., Any]


class Step(Protocol):
    """One reduction, taken back. Steps are taken back in reverse order."""

    def lift(self, full: np.ndarray) -> None:
        """A choice of what is left becomes, in place, a choice of what there was."""

    def project(self, part: np.ndarray) -> None:
        """The other way, where it is defined: a strategy that was removed becomes -1."""

    def widen(self, masks: "Masks") -> None:
        """Strategies that a choice within `masks.room` of the optimum may take: from what is left to what there was.
        Reductions keep *one* optimum; others that cost little more may use what was removed, and with rows they may be the
        better ones. Each step bounds what coming back costs. Only for cores without rows."""


@dataclass
class Masks:
    """`of[v]`: bool per strategy of v. Equal masks are one object, which is what `memo` needs."""

    room: float
    memo: Memo  # Core.memo_shaped
    of: dict[int, np.ndarray] = field(default_factory=dict)
    same: dict[bytes, np.ndarray] = field(default_factory=dict)

    def put(self, v: int, mask: np.ndarray) -> None:
        self.of[v] = self.same.setdefault(mask.tobytes(), mask)

    def run(self, v: int, compute: Callable[..., np.ndarray], *args: Any) -> None:
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


def _undominated_within(shape: tuple[float], change: np.ndarray, kept: np.ndarray, alive: np.ndarray) -> np.ndarray:
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
