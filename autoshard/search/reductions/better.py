"""Which of many strategies is never dearer than which, compiled: pairs of nodes have up to two thousand, and most comparisons end at the first
neighbour that forbids one of the two."""
from __future__ import annotations

import math

import numpy as np

from autoshard.search.dual.jit import compiled
from autoshard.search.problem import one_after_other


@compiled
def never_dearer(cost: np.ndarray, most: np.ndarray, first: np.ndarray, width: np.ndarray, kind: np.ndarray, out: np.ndarray) -> None:
    """`out[a, b]`, where it is true, becomes whether b instead of a never costs more. `most[first[p]:]`: by kinds, row-major in a width, the most
    that such a change adds at neighbour p; `kind[p, a]`. Sums are in the order of the neighbours."""
    for a in range(len(cost)):
        for b in range(len(cost)):
            if not out[a, b]:
                continue
            worst = cost[b] - cost[a]
            for p in range(len(first)):
                worst += most[first[p] + kind[p, a] * width[p] + kind[p, b]]
                if worst == math.inf:
                    break
            out[a, b] = worst <= 0.0  # not where it is nan


def joined(changes: list[tuple[np.ndarray, np.ndarray | None]], k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(most, first, width, kind) of `never_dearer` for `k` strategies. `changes`: per neighbour (the most by kinds, kind of every strategy; None
    where each is its own)."""
    first, most = one_after_other([most.ravel() for most, _ in changes], [id(most) for most, _ in changes])
    width = np.array([most.shape[1] for most, _ in changes], dtype=np.int64)
    kind = np.array([np.arange(k) if of is None else of for _, of in changes], dtype=np.int64).reshape(len(changes), k)
    return most, first, width, kind
