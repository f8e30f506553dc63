"""What the fullest rank works at least because blocks are not divided: of 80 equal layers and a head on 16 ranks, one has six layers, or five and
the head.

Most blocks of a model are equal. If those take t seconds of a step, and the others that rank r has take e_r, it has room for floor((T - e_r) / t) of
the equal ones within T. All ranks together must have room for all of them; which ranks have the others is tried.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

MOST_OTHERS = 6
"""With more blocks that are unlike the others their seconds are left out."""
PRECISION = 1e-9


def fullest_rank(seconds: np.ndarray, ranks: int) -> float:
    """Seconds that some rank works at least, for any way to give each block to one of the ranks. `seconds`: of each block."""
    values, counts = np.unique(seconds, return_counts=True)
    each, count = float(values[counts.argmax()]), int(counts.max())
    others = seconds[seconds != each].tolist()
    if each <= 0.0:
        return float(seconds.max(initial=0.0))
    groupings = _groupings(others if len(others) <= MOST_OTHERS else [], ranks)
    return min(_least(np.array(sums + [0.0] * (ranks - len(sums))), each, count) for sums in groupings)


def _least(taken: np.ndarray, each: float, count: int) -> float:
    """The least T in which ranks that have `taken` seconds to do have room for `count` blocks of `each` seconds."""
    taken, ranks = np.unique(taken, return_counts=True)
    ends = np.unique((taken[:, None] + each * np.arange(count + 1)[None, :]).ravel())
    ends = ends[ends >= taken[-1]]
    room = np.floor((ends[:, None] - taken[None, :]) / each + PRECISION) @ ranks
    return float(ends[np.argmax(room >= count)])


def _groupings(others: list[float], ranks: int) -> Iterator[list[float]]:
    """The sums of `others` in every way to put them on at most so many ranks."""
    if not others:
        yield []
        return
    first, rest = others[0], others[1:]
    for sums in _groupings(rest, ranks):
        for i in range(len(sums)):
            yield [*sums[:i], sums[i] + first, *sums[i + 1:]]
        if len(sums) < ranks:
            yield [*sums, first]


def fullest_unlike(rows: Sequence[np.ndarray], paid: Sequence[float]) -> float:
    """The same where blocks take other seconds on other ranks, and there are several rows of seconds: `rows`: [rank, block] each, of which a rank
    gets `paid` back; the rank works at least what the worst row says. Of blocks that are unlike the others the dearest is counted."""
    likes, counts = np.unique(rows[0][0], return_counts=True)
    alike = rows[0][0] == likes[counts.argmax()]
    each, count = np.stack([row[:, alike].min(1) for row in rows]), int(alike.sum())
    rest = np.stack([np.where(alike, 0.0, row) for row in rows])
    other = rest[:, :, rest[0, 0].argmax()]
    back = np.array(paid)[:, None]

    def has_room(seconds: float) -> bool:
        with np.errstate(divide="ignore"):
            room, beside = (np.floor(np.clip((seconds + back - taken) / each, -1.0, count) + PRECISION).min(0) for taken in (0.0, other))
        return bool((room.min() >= 0.0) and (room.sum() - room + beside)[beside >= 0.0].max(initial=-1.0) >= count)

    low, high = 0.0, float(max(row.sum(1).max() for row in rows))
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        low, high = (low, middle) if has_room(middle) else (middle, high)
    return low
