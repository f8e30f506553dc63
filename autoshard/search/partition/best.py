"""The cheapest partition by its true price, with a bound.

The bound of a partition is cheap and its price is not, so partitions are priced in the order of their bounds until the next bound is no less than
the best price: then that one is the cheapest of all. Partitions come in levels of T, each complete before the next.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from autoshard.search.partition.bound import bounds
from autoshard.search.partition.chain import Chain, Course, rank_bytes
from autoshard.search.partition.enumerate import within
from autoshard.search.partition.feasible import PRECISION, Stages

Price = Callable[[np.ndarray], np.ndarray]
LEVELS = (0.0, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)  # of the way from the bound to the best price
AT_ONCE = 64


@dataclass(frozen=True)
class Partition:
    """`seconds` is the price, `bound` what no partition that fits is below, `priced` how many were priced. Without `cuts` none was found to fit;
    where the bound is infinite there is none."""

    cuts: tuple[int, ...]
    seconds: float
    bound: float
    priced: int

    @property
    def gap(self) -> float:
        return 1.0 - self.bound / self.seconds if 0.0 < self.seconds < np.inf else 0.0


@dataclass(eq=False)
class Search:
    """What has been priced so far, and the best of it."""

    stages: Stages
    price: Price
    most: int
    seen: dict[tuple[int, ...], float] = field(default_factory=dict)
    best: float = np.inf
    cuts: tuple[int, ...] = ()

    def offer(self, candidates: np.ndarray) -> None:
        """Prices the rows that are new, fit and are bounded below the best price, in the order of their bounds."""
        candidates = self._open(candidates)
        limits = bounds(self.stages.chain, self.stages.course, candidates)
        order = np.argsort(limits, kind="stable")
        for begin in range(0, len(order), AT_ONCE):
            rows = [i for i in order[begin:begin + AT_ONCE] if limits[i] < self.best * (1 - PRECISION)]
            if not rows:
                return
            for row, seconds in zip(candidates[rows].tolist(), self.price(candidates[rows]).tolist()):
                self.seen[tuple(row)] = seconds
                if seconds < self.best:
                    self.best, self.cuts = seconds, tuple(row)

    def _open(self, candidates: np.ndarray) -> np.ndarray:
        new = [row for row in candidates.tolist() if tuple(row) not in self.seen]
        kept = np.array(new, dtype=np.int64).reshape(-1, self.stages.course.stages + 1)
        limit = self.stages.memory_limit
        return kept[(rank_bytes(self.stages.chain, self.stages.course, kept) <= limit).all(1)] if np.isfinite(limit) else kept

    def descend(self) -> None:
        """Moves a block from one stage to another as long as that is cheaper: a good price early leaves little to enumerate."""
        best = np.inf
        while self.best < best and len(self.seen) < self.most:
            best = self.best
            self.offer(self.possible(np.array(self.cuts) + moves(self.stages.course.stages)))

    def possible(self, cuts: np.ndarray) -> np.ndarray:
        """The rows whose stages can be, each by itself."""
        cuts = cuts[(np.diff(cuts, axis=1) > 0).all(1)]
        return cuts[self.stages.fits[np.arange(self.stages.course.stages), cuts[:, :-1], cuts[:, 1:]].all(1)]

    def level(self, seconds: float) -> bool:
        """Prices what may be within `seconds`; whether that was all of it."""
        level = within(self.stages, seconds, self.most)
        self.offer(level.cuts)
        if self.cuts:
            self.descend()
        return level.complete


def moves(stages: int) -> np.ndarray:
    """Steps of cuts that move one block from a stage to another: those between the two go along."""
    runs: list[np.ndarray] = []
    for first in range(1, stages):
        for last in range(first, stages):
            run = np.zeros(stages + 1, dtype=np.int64)
            run[first:last + 1] = 1
            runs += [run, -run]
    return np.array(runs, dtype=np.int64).reshape(-1, stages + 1)


def balanced(chain: Chain, stages: int) -> np.ndarray:
    """One row of cuts that is as even as block by block prices say."""
    places = np.arange(chain.blocks)
    work = np.cumsum((chain.both + chain.weight)[places, places + 1])
    wanted = np.searchsorted(work, work[-1] * np.arange(1, stages) / stages) + 1
    inner = np.arange(1, stages)
    cuts = np.maximum.accumulate(np.maximum(wanted, inner) - inner) + inner  # at least one block each, from the left
    return np.array([[0, *np.minimum(cuts, chain.blocks - stages + inner), chain.blocks]])


def even(blocks: int, course: Course) -> np.ndarray:
    """Rows of cuts in which all ranks have as many blocks, or one more: where a rank has several stages, stages that are even by themselves may leave
    one rank with twice the blocks of another."""
    base, more = divmod(blocks, course.stages)
    rounds = [list(places) for places in zip(*course.of_rank)]
    rows = []
    for first in range(len(rounds)):
        for step in (1, -1):
            order = [s for places in (*rounds[first:], *rounds[:first]) for s in places[::step]]
            sizes = np.full(course.stages, base)
            sizes[order[:more]] += 1
            rows.append(np.concatenate([[0], np.cumsum(sizes)]))
    return np.unique(np.array(rows), axis=0)


def partition(chain: Chain, course: Course, price: Price, memory_limit: float = np.inf, most: int = 1_000, cutoff: float = np.inf) -> Partition:
    """The cheapest cut of `chain` by `price`, which takes rows of cuts and gives seconds, none below their bound. With more than about `most`
    partitions between bound and price the search ends with the best one that it has seen, and the bound is proven all the same.
    Partitions that are not below `cutoff` are of no use: if there is no other, the bound is the cutoff, and there are no cuts."""
    stages = Stages(chain, course, memory_limit)
    if stages.too_full:
        return Partition((), np.inf, np.inf, 0)
    bound = stages.bound(cutoff)
    if bound >= cutoff:
        return Partition((), np.inf, bound, 0)
    search = Search(stages, price, most, best=cutoff)
    several = len(course.of_rank) < course.stages == len(course.of_rank) * len(course.of_rank[0])
    starts = [balanced(chain, course.stages), *([even(chain.blocks, course)] if several else [])]
    search.offer(search.possible(np.concatenate(starts)))
    if search.cuts:
        search.descend()
    bound = _by_levels(search, bound)
    return Partition(search.cuts, search.best if search.cuts else np.inf, min(bound, search.best), len(search.seen))


def _by_levels(search: Search, root: float) -> float:
    """Prices level by level; the bound that is proven at the end."""
    bound = root
    for level in LEVELS:
        known = search.best if np.isfinite(search.best) else 2.0 * root
        limit = root + level * (known - root) + PRECISION * root
        if not search.level(limit):
            return bound
        bound = limit
        if bound >= search.best * (1 - PRECISION):
            return search.best
    both = search.stages.chain.both
    endless = 1e3 * search.stages.course.microbatches * search.stages.course.stages * both[np.isfinite(both)].max()
    return search.best if search.level(endless) else bound
