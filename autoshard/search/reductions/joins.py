"""Two nodes become one, whose strategies are the pairs that are still possible: where that raises the bound.

Message passing is exact on trees. On a cycle its bound may mix strategies that do not go together, and joining two nodes of the cycle
makes it shorter. Reduced costs forbid most pairs before (`Dual.reduce`), so that a joint node is far smaller than the product: of two nodes with
60 strategies each, 100 pairs may be left. With enough joins nothing is left but one node, so this closes any gap; the question is
only how large tables become on the way. So of all joins those come first that raise the bound most for their size.

Not a rule of the sweep, and only for cores without rows, as `pairs.py`."""
from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import combinations

import numpy as np

from autoshard.search.reductions.core import Core
from autoshard.search.reductions.dead import Infeasible
from autoshard.search.reductions.pairs import merge
from autoshard.search.reductions.table import Table

HUB = 8  # neighbours of a node; two around a larger one are not tried for its sake
LARGEST_CUBE = 2_000_000  # strategies of three nodes multiplied; above, a third node is left out of the gain
LEAST_GAIN = 1e-4  # of the room: less counts as none


def join_best(core: Core, largest: int, room: float) -> int:
    """Join pairs of at most `largest` possible strategies, each node once, best first. `room`: the gap to be closed. Costs of `core` must be
    reparametrised, as `Dual.reduce` leaves them. Returns how many joins were made. Raises Infeasible where no pair is possible."""
    chosen = _disjoint(core, _ranked(core, largest, room))
    for u, v in chosen:
        _join(core, u, v)
    return len(chosen)


def _join(core: Core, u: int, v: int) -> None:
    merge(core, u, v)
    possible = np.flatnonzero(np.isfinite(core.cost[u]))
    if not len(possible):
        raise Infeasible(u)
    if len(possible) < len(core.cost[u]):
        core.keep(u, possible)


def _ranked(core: Core, largest: int, room: float) -> list[tuple[float, float, int, int, int]]:
    """Candidates, best first: those that raise the bound by their gain against their size, then those that grow least."""
    least = {v: float(core.cost[v].min()) for v in core.alive}
    found = []
    for u, v in sorted(_candidates(core)):
        table = core.adj[u].get(v)
        size = len(core.cost[u]) * len(core.cost[v]) if table is None else int(np.count_nonzero(np.isfinite(table.a)))
        if size > largest:
            continue
        common = core.adj[u].keys() & core.adj[v].keys()
        gained = (_least_joint(core, u, v, table, sorted(common)) - least[u] - least[v]) / room if common else 0.0
        if gained <= LEAST_GAIN:
            if table is None:
                continue  # nothing ties them
            gained = 0.0
        growth = size / max(len(core.cost[u]), len(core.cost[v])) / (1 + len(common))
        found.append((-gained / math.log(2 + size), growth, size, u, v))
    return sorted(found)


def _candidates(core: Core) -> set[tuple[int, int]]:
    """Neighbours, and nodes with two neighbours in common: with those they make a cycle of four."""
    seen: set[tuple[int, int]] = set()
    out = {(u, v) for u in core.alive for v in core.adj[u] if u < v}
    for w in core.alive:
        if len(core.adj[w]) <= HUB:
            around = set(combinations(sorted(core.adj[w]), 2))
            out |= around & seen
            seen |= around
    return out


def _least_joint(core: Core, u: int, v: int, table: Table | None, common: Iterable[int]) -> float:
    """The least cost of the two together with, per common neighbour, the best that it can do for both."""
    joint = core.cost[u][:, None] + core.cost[v][None, :]
    if table is not None:
        joint = joint + table.a
    for w in common:
        left, right = core.adj[w][u].a + core.cost[w][:, None], core.adj[w][v].a
        if joint.size * len(left) <= LARGEST_CUBE:
            best = left[0][:, None] + right[0][None, :]
            for a, b in zip(left[1:], right[1:], strict=True):
                np.minimum(best, a[:, None] + b[None, :], out=best)
            joint = joint + best
    return float(joint.min())


def _disjoint(core: Core, ranked: list[tuple[float, float, int, int, int]]) -> list[tuple[int, int]]:
    """Each node once. One without a gain takes its neighbourhood: what the next join would be worth there is known only after it."""
    taken: set[int] = set()
    out = []
    for score, _, _, u, v in ranked:
        if u not in taken and v not in taken:
            taken.update((u, v))
            if score == 0:
                taken.update(core.adj[u], core.adj[v])
            out.append((u, v))
    return out
