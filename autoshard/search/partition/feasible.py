"""Which partitions may be within T seconds: what the first s stages may take at most, so that the others can follow.

    room(s, a) = max over b of min(T - M t_ab, room(s + 1, b) - t_ab - c_b),   room(S, K) = inf

is the largest sum of t = f + b and hops in front of a stage s that begins at block a. It is exact for the path term of the bound with one stage
per rank: O(S K^2) per T. The same recursion with f in front and M (f + b + w) + once inside is exact for the term `work` (`spare`). The other
terms strike out stages that are too long whatever the others are.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.search.partition.chain import Chain, Course

PRECISION = 1e-9


@dataclass(frozen=True, eq=False)
class Together:
    """All ranks together work at least the sum of `work` [stage, a, b] over the stages, less `paid`, seconds."""

    work: np.ndarray
    paid: float


@dataclass(frozen=True, eq=False)
class Stages:
    """The dynamic programs over a chain that all T share. Index [s, a]: stage s begins at block a, or the row has ended. `work`: [s, a, b], where
    more is known of what a stage does in a step than what its parts make of it, as in `Chain`; `together`: the same of all ranks."""

    chain: Chain
    course: Course
    memory_limit: float = np.inf
    work: np.ndarray | None = None
    together: Sequence[Together] = ()

    @cached_property
    def worked(self) -> np.ndarray:
        """[s, a, b]: seconds of a step that the rank of stage s works on blocks a..b-1."""
        chain = self.chain
        own = self.course.microbatches * (chain.both + chain.weight) + chain.once
        return np.broadcast_to(own, (self.course.stages, *own.shape)) if self.work is None else self.work

    @cached_property
    def fits(self) -> np.ndarray:
        """[s, a, b]: whether blocks a..b-1 can be stage s; their bytes alone, whatever else is on the rank."""
        chain, course = self.chain, self.course
        ones = np.zeros((course.stages, chain.blocks + 1, chain.blocks + 1), dtype=bool)
        for stages, loads in zip(course.of_rank, course.loads):
            for place, stage in enumerate(stages):
                held = [x * chain.saved + y * chain.between for x, y in np.unique(loads[:, :, place], axis=0)]
                ones[stage] = chain.stored + chain.peak + np.max(held, axis=0, initial=0.0) <= self.memory_limit
        return ones & np.isfinite(chain.both) & (True if course.allowed is None else course.allowed)

    @cached_property
    def too_full(self) -> bool:
        """Whether the ranks together have less memory than any partition takes, when each of them holds most micro-batches."""
        return bool(np.isfinite(self.memory_limit)) and self.least_bytes > self.memory_limit

    @cached_property
    def least_bytes(self) -> float:
        """Bytes of the fullest rank at least, of any partition: what the ranks hold together, when each of them holds most micro-batches."""
        chain, course = self.chain, self.course
        held = np.zeros((course.stages, 2))
        for stages, loads in zip(course.of_rank, course.loads):
            held[stages] = loads[loads.sum((1, 2)).argmax()].T
        nbytes = chain.stored + held[:, :1, None] * chain.saved + held[:, 1:, None] * chain.between
        return self._least_sum(nbytes) / len(course.of_rank)

    @cached_property
    def hops(self) -> np.ndarray:
        """[s, b]: seconds both ways between stage s, which ends at b, and the next one."""
        return np.where(np.append(self.course.crosses, False)[:, None], self.chain.hop, 0.0)

    @cached_property
    def least_before(self) -> np.ndarray:
        """The least sum of t and hops before."""
        return self._least_before(self.chain.both, self.hops)

    @cached_property
    def least_early(self) -> np.ndarray:
        """The least sum of forwards and their hops before."""
        hops = np.where(np.append(self.course.crosses, False)[:, None], self.chain.hop_forward, 0.0)
        return self._least_before(self.chain.forward, hops)

    def _least_before(self, table: np.ndarray, hops: np.ndarray) -> np.ndarray:
        """`table`: [a, b], or [s, a, b]."""
        least = np.full((self.course.stages + 1, self.chain.blocks + 1), np.inf)
        least[0, 0] = 0.0
        for s in range(self.course.stages):
            steps = np.where(self.fits[s], (table[s] if table.ndim == 3 else table) + hops[s], np.inf)
            least[s + 1] = (least[s][:, None] + steps).min(0)
        return least

    @cached_property
    def least_after(self) -> np.ndarray:
        """The least sum of t and hops from stage s on."""
        least = np.full((self.course.stages + 1, self.chain.blocks + 1), np.inf)
        least[-1, -1] = 0.0
        for s in reversed(range(self.course.stages)):
            steps = np.where(self.fits[s], self.chain.both + self.hops[s], np.inf)
            least[s] = (steps + least[s + 1]).min(1)
        return least

    @cached_property
    def alone(self) -> np.ndarray:
        """[s, a, b]: a bound for all partitions that have this stage, from the terms `turns`, `work` and `Little` of the stage by itself."""
        chain, course = self.chain, self.course
        away = (self.hops + self.least_after[1:])[:, None, :]
        own = course.turns[np.arange(course.stages), :, :, np.arange(course.stages)]  # [s, part, kind]
        kinds = np.stack([chain.forward, chain.backward, chain.weight])
        with np.errstate(invalid="ignore"):
            before, middle, after = (np.einsum("sk,kab->sab", own[:, part], kinds) for part in range(3))
            passed = np.einsum("sk,kab->sab", own[:, 2, :2], kinds[:2])
            begun = np.maximum(before, chain.forward + away) + middle
            drained = np.where(course.drains[:, None, None], away + chain.backward, 0.0)
            turns = begun + self.least_before[:-1, :, None] + np.maximum(passed, drained)
            worked = begun + self.least_early[:-1, :, None] + after + chain.once
            little = self.least_before[:-1, :, None] + course.microbatches * (chain.both + away) / course.in_flight[:, None, None]
            terms = [turns, worked, little] if self.work is None else [little, *self._turned(own, away)]
            return np.where(self.fits, np.maximum.reduce(terms), np.inf)

    def _turned(self, own: np.ndarray, away: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The term `turns` where of a stage nothing but sums of its windows is known. A stage whose first backward comes before its last forward
        does at least `turned` micro-batches' worth of its windows besides waiting for `away` twice."""
        chain, course = self.chain, self.course
        least = np.minimum(own[:, 1, :2].min(1) + 1, own[:, 1, 2] if chain.weight.any() else np.inf)  # one forward before, one backward after
        turned = np.where(course.drains, least, 0.0)[:, None, None]
        twice = np.where(course.drains, 2.0, 0.0)[:, None, None] * away
        ended = turned * (chain.both + chain.weight) + twice + self.least_before[:-1, :, None]
        worked = turned / course.microbatches * self.worked + twice + self.least_early[:-1, :, None]
        return ended, worked

    @cached_property
    def floor(self) -> float:
        """No partition is faster: the ranks together have all the work, and each waits for its first stage."""
        ranks = len(self.course.of_rank)
        waits = sum(float(self.least_early[stages[0]].min()) for stages in self.course.of_rank)
        return (max([self._least_sum(self.worked), *(self._least_sum(t.work) - t.paid for t in self.together)]) + waits) / ranks

    def _least_sum(self, work: np.ndarray) -> float:
        none = np.zeros((self.course.stages, self.chain.blocks + 1))
        return float(self._least_before(work, none)[-1, -1])

    def spare(self, seconds: float) -> np.ndarray:
        """`room` for the term `work`: the largest sum of forwards and their hops in front of a stage."""
        spare = np.full((self.course.stages + 1, self.chain.blocks + 1), -np.inf)
        spare[-1, -1] = np.inf
        hops = np.where(np.append(self.course.crosses, False)[:, None], self.chain.hop_forward, 0.0)
        for s in reversed(range(self.course.stages)):
            with np.errstate(invalid="ignore"):
                here = np.minimum(seconds - self.worked[s], spare[s + 1] - self.chain.forward - hops[s])
            spare[s] = np.where(self.alone[s] <= seconds, here, -np.inf).max(1)
        return spare

    def room(self, seconds: float) -> np.ndarray:
        room = np.full((self.course.stages + 1, self.chain.blocks + 1), -np.inf)
        room[-1, -1] = np.inf
        for s in reversed(range(self.course.stages)):
            room[s] = np.where(self.alone[s] <= seconds, self._room_with(s, room[s + 1], seconds), -np.inf).max(1)
        return room

    def _room_with(self, s: int, after: np.ndarray, seconds: float) -> np.ndarray:
        """[a, b]: what may be before stage s of blocks a..b-1."""
        with np.errstate(invalid="ignore"):
            here = seconds - self.course.microbatches * self.chain.both
            return np.minimum(here, after - self.chain.both - self.hops[s])

    def feasible(self, seconds: float) -> bool:
        return bool(self.room(seconds)[0, 0] >= 0.0 and self.spare(seconds)[0, 0] >= 0.0)

    def bound(self, enough: float = np.inf) -> float:
        """A T that no partition is below: the largest that bisection finds to be infeasible, or `enough`. Infinite where nothing fits."""
        low = self.floor
        if low >= enough or not np.isfinite(low):
            return low
        if np.isfinite(enough) and not self.feasible(enough):
            return enough
        if self.feasible(low):
            return low
        high = min(2.0 * low or 1.0, enough)
        while not self.feasible(high):
            low, high = high, min(2.0 * high, enough)
        while high - low > PRECISION * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self.feasible(middle) else (middle, high)
        return low
