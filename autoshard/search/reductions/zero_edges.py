"""An edge whose table is all zeros couples nothing: it is dropped. Made up (`separable` covers it), to see what a reduction takes."""
from __future__ import annotations

from autoshard.search.reductions.core import Core


def drop_zero_edges(core: Core, v: int) -> bool:
    empty = [u for u, table in core.adj[v].items() if not table.fact(lambda t: t.any())]
    for u in empty:
        core.drop_edge(v, u)
    return bool(empty)
