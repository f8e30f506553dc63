"""What the problem with its layers tied knows of the whole one at the same prices: its messages, for every copy."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from autoshard.search.dual.dual import Dual
from autoshard.search.tie import Tied


@dataclass(frozen=True, eq=False)
class Alike:
    """`choice`: for every node of the problem to be solved, likely the best at its prices. `tied` and `dual`: the problem with its layers tied and
    what converged there at these prices, if that helps to begin. `around`: nodes of that one among which its bound needed pairs."""

    choice: np.ndarray
    tied: Tied | None = None
    dual: Dual | None = None
    around: frozenset[int] = frozenset()

    def nodes(self, alive: Iterable[int]) -> frozenset[int]:
        """The copies of `around`."""
        if self.tied is None or not self.around:
            return self.around
        return frozenset(v for v in alive if int(self.tied.place[v]) in self.around)

    def begin(self, whole: Dual) -> None:
        """Let the sweeps of the whole problem begin where those of the tied one ended: they take a fourth as long. Edges that became one there share
        its messages, and nodes that were not reduced alike begin without. Any messages give a valid bound."""
        if self.tied is not None and self.dual is not None:
            _carry(whole, self.dual, self.tied.place, self.tied.copies)


def carry_on(dual: Dual, before: Dual) -> None:
    """Let the sweeps of `dual` begin where those of `before` ended, along edges that both have."""
    _carry(dual, before, None, 1)


def _carry(dual: Dual, before: Dual, place: np.ndarray | None, copies: int) -> None:
    ours, theirs = _Directed(dual, place), _Directed(before, None)
    if not len(ours.edge) or not len(theirs.edge):
        return
    order = np.argsort(theirs.edge)
    at = order[np.minimum(np.searchsorted(theirs.edge, ours.edge, sorter=order), len(order) - 1)]
    _, edge, edges = np.unique(ours.edge, return_inverse=True, return_counts=True)
    same = (theirs.edge[at] == ours.edge) & (theirs.size[at] == ours.size)
    size = ours.size[same]
    within = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
    sent = before.message[np.repeat(theirs.first[at[same]], size) + within] * np.repeat(copies / edges[edge[same]], size)
    dual.message[np.repeat(ours.first[same], size) + within] = sent
    dual.before[:] = dual.message


class _Directed:
    """The messages of a dual: the edge that each goes along, where it starts, and of how many strategies it is."""

    def __init__(self, dual: Dual, place: np.ndarray | None) -> None:
        p = dual.packed
        names = dual.nodes if place is None else place[dual.nodes]
        v = np.repeat(np.arange(len(dual.nodes)), np.diff(p.adj_ptr))
        self.edge = names[v] * np.int64(2**32) + names[p.adj_node]
        self.first, self.size = p.adj_message, np.diff(p.start)[v]
