"""Small groups of nodes that only rows hold together with the rest become one node each, where several look the same.

Near the optimum most of a model is decided; what is open are such groups, the same in every layer. A MIP that sees them
one by one tries every way in which equal layers could swap places. As nodes that look the same they are counted instead: how
many of them take each strategy (`milp.py`). Example: 32 layers with two nodes of 3 and 5 strategies and an edge between become
32 nodes of at most 15 strategies, which the program sees as 15 whole numbers that add up to 32.

At prices of the rows nothing links the groups: each has a least cost, these add up to a bound, and of a cost that is assumed a group may take
what is above the bound, but no more (`Assumed`). So most joint strategies go, and groups become nodes that would have millions of them."""
from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autoshard.search.reductions import drop_forbidden
from autoshard.search.reductions.core import Core, Key, connected
from autoshard.search.reductions.dead import Infeasible, drop_dead
from autoshard.search.reductions.dominance import dominate
from autoshard.search.reductions.pairs import merge
from autoshard.search.reductions.steps import strategies_left

LARGEST = 1000  # joint strategies on the way; dominance leaves a few of them
LARGEST_CHEAP = 2500  # the same where a cost is assumed
LOOKED_AT = 50_000  # joint strategies of which those that cost too much go first
FEW = 64  # joint strategies; to look which cost too much takes longer than dominance
MARGIN = 1e-9  # of a cost: what rounding may add to it


@dataclass(frozen=True, eq=False)
class Assumed:
    """Only choices are asked for that cost at most `upper`. `prices` of the rows; `bounded(core)` of a core without rows: a bound, and masks of the
    strategies that a choice of a given cost may take."""

    prices: np.ndarray
    upper: float
    bounded: Callable[[Core], tuple[float, Callable[[float], dict[int, np.ndarray]]]]


def gather(core: Core, assumed: Assumed | None = None) -> None:
    """Merge every connected group of nodes of which there are copies into one node, as far as it stays small. In place. Raises Infeasible where no
    choice costs as little as is assumed."""
    if assumed is not None:
        _gather_cheap(core, assumed)
        return
    kinds: dict[Key, list[list[int]]] = defaultdict(list)
    for group in components(core):
        if len(group) > 1:
            kinds[_look(core, group)].append(group)
    with np.errstate(invalid="ignore"):  # forbidden - forbidden, see `reduce_core`
        for groups in kinds.values():
            for group in groups if len(groups) > 1 else ():
                _join(core, group)


def _gather_cheap(core: Core, assumed: Assumed) -> None:
    kinds: dict[Key, list[list[int]]] = defaultdict(list)
    for group in components(core):
        kinds[_look(core, group)].append(group)
    prices = np.minimum(assumed.prices, core.price)
    least = [assumed.bounded(_priced(core, groups[0], prices))[0] for groups in kinds.values()]
    fixed = core.constant + _at(prices, core.base - core.limit)
    room = assumed.upper - fixed - math.fsum(len(groups) * low for groups, low in zip(kinds.values(), least, strict=True))
    room += MARGIN * max(abs(assumed.upper), abs(fixed))
    if room < 0:
        raise Infeasible(-1)
    with np.errstate(invalid="ignore"):  # forbidden - forbidden, see `reduce_core`
        for groups, low in zip(kinds.values(), least, strict=True):
            if len(groups[0]) > 1:
                _make_alike(core, groups)
                moves = _join_cheap(core, groups[0], prices, low + room, assumed)
                for group in groups[1:]:
                    for move in moves:
                        _apply(core, group, *move)


def _at(prices: np.ndarray, loads: np.ndarray) -> float:
    return float(np.dot(prices[prices > 0], loads[prices > 0]))  # a row without a price may have no limit


def _priced(core: Core, group: list[int], prices: np.ndarray) -> Core:
    """A group alone, its nodes numbered from 0, with what its loads cost at `prices`."""
    place = {v: i for i, v in enumerate(group)}
    alone = Core(np.zeros_like(core.limit), core.price)
    alone.cost, alone.items = [core.cost[v] for v in group], [core.items[v] for v in group]
    alone.adj = [{place[u]: table for u, table in core.adj[v].items()} for v in group]
    alone.price_rows(prices)
    return alone


def _make_alike(core: Core, groups: list[list[int]]) -> None:
    """Groups that look the same get the very arrays of the first: what is found out about one is then known of all (`Core.memo`)."""
    first = groups[0]
    for group in groups[1:]:
        place = {v: i for i, v in enumerate(group)}
        for v, like in zip(group, first, strict=True):
            core.cost[v], core.items[v] = core.cost[like], core.items[like]
            core.adj[v] = {u: core.adj[like][first[place[u]]] for u in core.adj[v]}


Move = tuple[int, int, dict[int, np.ndarray]]
"""Two of a group's nodes that become one, and what is kept of nodes then; nodes by their places in the group."""


def _join_cheap(core: Core, group: list[int], prices: np.ndarray, upper: float, assumed: Assumed) -> list[Move]:
    """Merge neighbours, the smallest pair first, and keep what a choice may take that costs the group at most `upper` at `prices`."""
    place, moves, left, base = {v: i for i, v in enumerate(group)}, list[Move](), set(group), core.base.copy()
    while len(left) > 1:
        size, u, v = min((len(core.cost[u]) * len(core.cost[v]), u, v) for u in left for v in core.adj[u] if u < v)
        kept: dict[int, np.ndarray] = {}
        if size > LOOKED_AT:
            return moves
        if size > FEW:
            nodes = sorted(left)
            alone = _priced(core, nodes, prices)
            kept = _cheap(alone, nodes.index(u), nodes.index(v), upper - _at(prices, core.base - base), assumed)
            if len(kept[nodes.index(u)]) > LARGEST_CHEAP:
                return moves
            kept = {place[nodes[i]]: few for i, few in kept.items()}
        moves.append((place[u], place[v], kept))
        _apply(core, group, *moves[-1])
        left.remove(v)
    return moves


def _cheap(alone: Core, u: int, v: int, upper: float, assumed: Assumed) -> dict[int, np.ndarray]:
    """What is kept of every node where u and v become u."""
    merge(alone, u, v)
    since, sizes = len(alone.undo), {w: len(alone.cost[w]) for w in alone.alive}
    drop_forbidden(alone)
    for w, mask in assumed.bounded(alone)[1](upper).items():
        if not mask.any():
            raise Infeasible(w)
        if not mask.all():
            alone.keep(w, np.flatnonzero(mask))
    drop_forbidden(alone)
    return strategies_left(alone.undo[since:], sizes)


def _apply(core: Core, group: list[int], u: int, v: int, kept: dict[int, np.ndarray]) -> None:
    merge(core, group[u], group[v])
    for w, few in kept.items():
        if len(few) < len(core.cost[group[w]]):
            core.keep(group[w], few)
    drop_dead(core, group[u])
    dominate(core, group[u])


def components(core: Core) -> list[list[int]]:
    """Nodes connected by edges, each group in ascending order."""
    seen: set[int] = set()
    found = []
    for first in core.alive:
        if first not in seen:
            group = connected(core, first)
            seen.update(group)
            found.append(sorted(group))
    return found


def look(core: Core, v: int) -> Key:
    """What of v does not depend on its neighbours, by value."""
    return core.cost[v].tobytes(), *((i.lo, i.hi, i.amount.tobytes()) for i in core.items[v])


def _look(core: Core, group: list[int]) -> Key:
    place = {v: i for i, v in enumerate(group)}
    edges = ((place[u], place[v], core.adj[u][v].a.tobytes()) for u in group for v in sorted(core.adj[u]) if u < v)
    return (*(look(core, v) for v in group), *edges)


def _join(core: Core, group: list[int]) -> None:
    """Merge neighbours, the smallest pair first: what is dearer and loads no row less than another is gone before the next."""
    left = set(group)
    while len(left) > 1:
        size, u, v = min((len(core.cost[u]) * len(core.cost[v]), u, v) for u in left for v in core.adj[u] if u < v)
        if size > LARGEST:
            return
        merge(core, u, v)
        left.remove(v)
        drop_dead(core, u)
        dominate(core, u)
