"""One message of message passing, compiled: what its sender costs at least, for each strategy of the node that gets it.

Places in the flat arrays are unsigned: a signed one may count from the end, and to look at its sign at every entry keeps the loops from making
several sums at once. `own` and `best` are memory for these loops, as long as the largest node; to make arrays takes as long as a short message."""
from __future__ import annotations

import numpy as np

from autoshard.search.dual.jit import compiled

Place = np.uint64


@compiled
def send(table: np.ndarray, message: np.ndarray, theta: np.ndarray, best: np.ndarray, base: int, k: int, width: int, m: int, t0: int, out: int,
         share: float) -> float:
    """Replace the message from the node of `k` strategies at `base` along an edge to one of `width`; its minimum is made zero and returned. Four
    strategies at a time: `best` is read and written for each of them otherwise."""
    wide, row, first, into = Place(width), Place(t0), Place(base), Place(m)
    for t in range(width):
        best[t] = np.inf
    single = k % 4
    for s in range(single):
        own = _own(theta, message, first + Place(s), into + Place(s), share)
        for t in range(width):
            value = own + table[row + Place(t)]
            best[t] = value if value < best[t] else best[t]
        row += wide
    for s in range(single, k, 4):
        own0 = _own(theta, message, first + Place(s), into + Place(s), share)
        own1 = _own(theta, message, first + Place(s + 1), into + Place(s + 1), share)
        own2 = _own(theta, message, first + Place(s + 2), into + Place(s + 2), share)
        own3 = _own(theta, message, first + Place(s + 3), into + Place(s + 3), share)
        row1, row2, row3 = row + wide, row + wide + wide, row + wide + wide + wide
        for t in range(width):
            at0, at1 = own0 + table[row + Place(t)], own1 + table[row1 + Place(t)]
            at2, at3 = own2 + table[row2 + Place(t)], own3 + table[row3 + Place(t)]
            at0 = at1 if at1 < at0 else at0
            at2 = at3 if at3 < at2 else at2
            at0 = at2 if at2 < at0 else at0
            best[t] = at0 if at0 < best[t] else best[t]
        row = row3 + wide
    least = best[0]
    for t in range(1, width):
        least = min(least, best[t])
    for t in range(width):
        message[Place(out) + Place(t)] = best[t] - least
    return least


@compiled
def send_by_kind(kind: np.ndarray, mine: int, other: int, rows: int, columns: int, table: np.ndarray, message: np.ndarray, theta: np.ndarray,
                 own: np.ndarray, best: np.ndarray, base: int, k: int, width: int, m: int, t0: int, out: int, share: float) -> float:
    """The same numbers, where strategies are alike: the best of each kind first, for sums are rounded up or down together."""
    for r in range(rows):
        own[r] = np.inf
    for c in range(columns):
        best[c] = np.inf
    for s in range(k):
        value = share * theta[Place(base) + Place(s)] - message[Place(m) + Place(s)]
        at = kind[mine + s]
        own[at] = value if value < own[at] else own[at]
    row = Place(t0)
    for r in range(rows):
        for c in range(columns):
            value = own[r] + table[row + Place(c)]
            best[c] = value if value < best[c] else best[c]
        row += Place(columns)
    least = best[0]
    for c in range(1, columns):
        least = min(least, best[c])
    for t in range(width):
        message[Place(out) + Place(t)] = best[kind[other + t]] - least
    return least


@compiled
def _own(theta: np.ndarray, message: np.ndarray, place: np.uint64, into: np.uint64, share: float) -> float:
    """What a strategy sends of its own. One without a partner got an infinite message, so its cost is infinite too, and it is never the least."""
    value = share * theta[place] - message[into]
    return np.inf if np.isnan(value) else value
