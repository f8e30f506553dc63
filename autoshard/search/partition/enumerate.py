"""All partitions that may be within T seconds: `Stages.room` says whether what is begun can be ended."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autoshard.search.partition.feasible import Stages

NODES = 10  # begun partitions that are looked at for each one wanted


@dataclass(frozen=True)
class Level:
    """Rows of cuts; `complete`: no other partition is within the level's seconds."""

    cuts: np.ndarray
    complete: bool


def within(stages: Stages, seconds: float, most: int) -> Level:
    """Every partition whose bound is at most `seconds`, and some of those above; at most `most` of them."""
    found: list[tuple[int, ...]] = []
    for nodes, cuts in enumerate(_begun(stages, seconds)):
        if nodes > NODES * most or len(found) > most:
            return Level(_rows(found[:most], stages), False)
        if len(cuts) > stages.course.stages:
            found.append(cuts)
    return Level(_rows(found, stages), True)


def _rows(cuts: list[tuple[int, ...]], stages: Stages) -> np.ndarray:
    return np.array(cuts, dtype=np.int64).reshape(-1, stages.course.stages + 1)


def _begun(stages: Stages, seconds: float) -> Iterator[tuple[int, ...]]:
    """The first cuts of partitions, and all their cuts, depth first. With one stage per rank none is a dead end for the path term."""
    room = stages.room(seconds)
    chain, course, m = stages.chain, stages.course, stages.course.microbatches

    begun: list[tuple[tuple[int, ...], float, tuple[float, ...]]] = [((0,), 0.0, (0.0,) * len(course.of_rank))] if room[0, 0] >= 0.0 else []
    while begun:
        cuts, before, busy = begun.pop()
        yield cuts
        s, a = len(cuts) - 1, cuts[-1]
        if s == course.stages:
            continue
        rank, both, work = course.rank_of[s], chain.both[a], chain.both[a] + chain.weight[a]
        after = before + both + stages.hops[s]
        possible = (stages.alone[s, a] <= seconds) & (before + m * both <= seconds) & (room[s + 1] >= after)
        possible &= m * (busy[rank] + work) <= seconds
        for b in np.flatnonzero(possible)[::-1].tolist():
            now = (*busy[:rank], busy[rank] + float(work[b]), *busy[rank + 1:])
            begun.append(((*cuts, b), float(after[b]), now))
