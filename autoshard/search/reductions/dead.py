"""Arc consistency: a strategy whose cost is infinite, or that fits no strategy of some neighbour, goes.

Example: costs [3, inf] leave one strategy; a table [[1, inf], [inf, inf]] removes the second row and column."""
from __future__ import annotations

import numpy as np

from autoshard.search.reductions.core import Core


class Infeasible(Exception):
    """No choice is feasible: a node has no strategy left, `node`, or where that is None every choice is over some row."""

    def __init__(self, node: int | None):
        super().__init__("every choice is over some row" if node is None else f"node {node} has no strategy left")
        self.node = node


def rows_alive(table: np.ndarray) -> np.ndarray | None:
    """Mask of rows with a finite entry; None when all have one."""
    alive = np.isfinite(table).any(axis=1)
    return None if alive.all() else alive


def finite(cost: np.ndarray) -> np.ndarray | None:
    mask = np.isfinite(cost)
    return None if mask.all() else mask


def drop_dead(core: Core, v: int) -> bool:
    mask = core.memo(finite, core.cost[v])
    for table in core.adj[v].values():
        alive = table.fact(rows_alive)
        if alive is not None:
            mask = alive if mask is None else mask & alive
    if mask is None:
        return False
    if not mask.any():
        raise Infeasible(v)
    core.keep(v, np.flatnonzero(mask))
    return True
