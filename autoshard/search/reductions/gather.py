"""Small groups of nodes that only rows hold together with the rest become one node each, where several look the same.

Near the optimum most of a model is decided; what is open are such groups, the same in every layer. A MIP that sees them
one by one tries every way in which equal layers could swap places. As nodes that look the same they are counted instead: how
many of them take each strategy (`milp.py`). Example: 32 layers with two nodes of 3 and 5 strategies and an edge between become
32 nodes of at most 15 strategies, which the program sees as 15 whole numbers that add up to 32."""
from __future__ import annotations

from collections import defaultdict

import numpy as np

from autoshard.search.reductions.core import Core, Key, connected
from autoshard.search.reductions.dead import drop_dead
from autoshard.search.reductions.dominance import dominate
from autoshard.search.reductions.pairs import merge

LARGEST = 1000  # joint strategies on the way; dominance leaves a few of them


def gather(core: Core) -> None:
    """Merge every connected group of nodes of which there are copies into one node, as far as it stays small. In place."""
    kinds: dict[Key, list[list[int]]] = defaultdict(list)
    for group in components(core):
        if len(group) > 1:
            kinds[_look(core, group)].append(group)
    with np.errstate(invalid="ignore"):  # forbidden - forbidden, see `reduce_core`
        for groups in kinds.values():
            for group in groups if len(groups) > 1 else ():
                _join(core, group)


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
