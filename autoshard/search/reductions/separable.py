"""An edge whose table is a sum a[s] + b[t] couples nothing: it moves into the two nodes.

Example: [[0, 3], [2, 5]] = [0, 2] + [0, 3]."""
from __future__ import annotations

import numpy as np

from autoshard.search.reductions.core import Core


def split(table: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """(a, b) with table = a + b, exactly for integers and to rounding for seconds; None when there is none."""
    if not np.isfinite(table[0]).all() or not np.isfinite(table[:, 0]).all():
        return None
    b = table[0].copy()
    a = table[:, 0] - table[0, 0]
    if not np.isfinite(table).all():
        return None
    error = np.abs(a[:, None] + b[None, :] - table).max()
    return (a, b) if error <= 4e-16 * np.abs(table).max() else None


def separate(core: Core, v: int) -> bool:
    changed = False
    for u, table in list(core.adj[v].items()):
        parts = table.fact(split)
        if parts is not None:
            core.drop_edge(v, u)
            core.add_cost(v, parts[0])
            core.add_cost(u, parts[1])
            changed = True
    return changed
