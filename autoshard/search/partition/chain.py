"""What a partition is made from: prices of every possible stage, and facts of the schedule that the stages will follow.

There are K blocks in a row; a stage is some of them that stand together, and S stages are given by S + 1 cuts 0 = e_0 < e_1 < ... < e_S = K.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

Floats = Sequence[float] | np.ndarray


@dataclass(frozen=True, eq=False)
class Chain:
    """Tables of K + 1 by K + 1: entry [a, b] is of the stage of blocks a..b-1, and a stage that cannot be has infinite `forward`.

    forward, backward, weight   seconds of a micro-batch; `weight` is the part of backward that may come later
    once                        seconds once a step
    stored, peak                bytes whatever is in flight, and bytes more while it computes
    saved, between              bytes of a micro-batch from forward to backward; from there to its weight part
    hop_forward, hop_backward   K + 1 seconds each: of a transfer over the cut before block k
    """

    forward: np.ndarray
    backward: np.ndarray
    weight: np.ndarray
    once: np.ndarray
    stored: np.ndarray
    peak: np.ndarray
    saved: np.ndarray
    between: np.ndarray
    hop_forward: np.ndarray
    hop_backward: np.ndarray

    @property
    def blocks(self) -> int:
        return len(self.hop_forward) - 1

    def undivided(self) -> Chain:
        """The same for schedules whose backward is in one part."""
        return replace(self, backward=self.backward + self.weight, weight=np.zeros_like(self.weight))

    @cached_property
    def both(self) -> np.ndarray:
        """Seconds from a micro-batch's arrival at a stage to its gradient's departure, without waiting."""
        return self.forward + self.backward

    @cached_property
    def hop(self) -> np.ndarray:
        return self.hop_forward + self.hop_backward


def chain_of_blocks(forward: Floats, backward: Floats, *, weight: Floats = (), once: Floats = (), stored: Floats = (), peak: Floats = (),
                    saved: Floats = (), between: Floats = (), hop_forward: Floats = (), hop_backward: Floats = ()) -> Chain:
    """The chain whose stages cost the sum of their blocks; `peak` is that of the largest block. What is left out is nothing."""
    blocks = len(forward)

    def added(values: Floats) -> np.ndarray:
        before = np.concatenate([[0.0], np.cumsum(np.broadcast_to(np.asarray(values, dtype=float) if len(values) else 0.0, (blocks,)))])
        return before[None, :] - before[:, None]

    def hops(values: Floats) -> np.ndarray:
        return np.concatenate([[0.0], values if len(values) else np.zeros(blocks - 1), [0.0]])

    highest = np.array([[max(peak[a:b], default=0.0) if len(peak) else 0.0 for b in range(blocks + 1)] for a in range(blocks + 1)])
    none = np.tril(np.full((blocks + 1, blocks + 1), np.inf))
    return Chain(added(forward) + none, added(backward), added(weight), added(once), added(stored), highest, added(saved), added(between),
                 hops(hop_forward), hops(hop_backward))


@dataclass(frozen=True, eq=False)
class Course:
    """What the prices of a partition depend on besides its stages.

    rank_of       the rank of each stage
    in_flight     per stage, the most micro-batches between the begin of forward and the end of backward
    turns         [s, part, kind, t]: how many forwards, backwards and weight parts of stage t the rank of stage s does before the first backward
                  of s (part 0), from there to the last forward of s (1), and after it (2)
    drains        per stage, whether its first backward comes before its last forward; where it does not, part 1 is empty
    loads         per rank, rows of how many micro-batches each of its stages holds at once: an array (rows, 2, stages of the rank), first
                  those that wait for backward, then those that wait for their weight part
    allowed       [s, a, b]: whether stage s may be blocks a..b-1; None: all may
    """

    rank_of: tuple[int, ...]
    microbatches: int
    in_flight: np.ndarray
    turns: np.ndarray
    drains: np.ndarray
    loads: tuple[np.ndarray, ...]
    allowed: np.ndarray | None = None

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    @cached_property
    def of_rank(self) -> tuple[np.ndarray, ...]:
        """The stages of each rank, in the order of the model."""
        return tuple(np.flatnonzero(np.array(self.rank_of) == rank) for rank in range(1 + max(self.rank_of)))

    @cached_property
    def crosses(self) -> np.ndarray:
        """Of each stage but the last, whether the next one is on another rank."""
        return np.diff(np.array(self.rank_of)) != 0


def whole(table: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    """Entries of `table` for the stages of each row of `cuts`."""
    return table[cuts[:, :-1], cuts[:, 1:]]


def rank_bytes(chain: Chain, course: Course, cuts: np.ndarray) -> np.ndarray:
    """Bytes that each rank needs at most, for each row of `cuts`."""
    stored, peak, saved, between = (whole(t, cuts) for t in (chain.stored, chain.peak, chain.saved, chain.between))
    ranks = []
    for stages, loads in zip(course.of_rank, course.loads):
        held = loads[:, 0] @ saved[:, stages].T + loads[:, 1] @ between[:, stages].T
        ranks.append(stored[:, stages].sum(1) + peak[:, stages].max(1) + held.max(0, initial=0.0))
    return np.stack(ranks, 1)
