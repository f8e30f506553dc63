"""Generated problems in the contest's format, for tests that want more than a handful of nodes."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np


def contest_problem(seed: int, nodes: int, strategies: int = 6, degree: int = 3, tightness: float = 0.45) -> dict:
    """A random graph that presolve cannot shrink much. `tightness`: the usage limit, from the least (0) to the mean (1)
    of what the fullest moment can hold."""
    rng = np.random.default_rng(seed)
    begin = np.sort(rng.integers(0, nodes, nodes))
    end = begin + rng.integers(1, max(2, nodes // 5), nodes)
    usage = rng.integers(1, 1000, (nodes, strategies))
    costs = rng.integers(0, 500, (nodes, strategies)) + (1000 - usage) // 2  # cheaper ones use more
    pairs = sorted({tuple(sorted(p)) for p in rng.integers(0, nodes, (degree * nodes, 2)).tolist() if p[0] != p[1]})
    tables = rng.integers(0, 1000, (len(pairs), strategies * strategies))
    tables[rng.random(tables.shape) < 0.05] = 10**18
    tables[:, 0] = 0  # the first strategies always go together
    usage[:, 0] = usage.min(axis=1)
    least, mean = (max(int(u[(begin <= t) & (t < end)].sum()) for t in begin) for u in (usage.min(axis=1), usage.mean(axis=1)))
    return {"problem": {"name": f"random {seed}", "usage_limit": int(least + tightness * (mean - least)),
                        "nodes": {"intervals": np.stack([begin, end], 1).tolist(), "costs": costs.tolist(), "usages": usage.tolist()},
                        "edges": {"nodes": [list(p) for p in pairs], "costs": tables.tolist()}}}


def write_problem(path: Path, **arguments) -> Path:
    path.write_text(json.dumps(contest_problem(**arguments)))
    return path
