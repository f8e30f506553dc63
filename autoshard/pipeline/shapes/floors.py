"""What no plan is below: floors of blocks, and of the stages that they make."""
from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from autoshard.pipeline.shapes.needs import Needs, added
from autoshard.search.partition import Chain, Course, Together, chain_of_blocks
from autoshard.search.partition.whole_blocks import fullest_rank, fullest_unlike

LEVELS = 6
"""Numbers of micro-batches in flight of which stages are bounded: each stage by the next smaller one."""


@dataclass(frozen=True, eq=False)
class Priced:
    """Seconds of a step per block, at least, with `price` seconds for every byte at the end of forward: of stages that hold no micro-batch then,
    and of those that hold `flying`. The least over plans of seconds and price times bytes is concave in what is held, so in between it is at
    least what lies between the two. `limit`: bytes of a rank, which pay back what is counted for them."""

    price: float
    flying: float
    empty: np.ndarray
    full: np.ndarray
    limit: float

    def at(self, count: float) -> np.ndarray:
        return self.empty + min(1.0, count / self.flying) * (self.full - self.empty)


@dataclass(frozen=True, eq=False)
class Floor:
    """Of every block, what no plan is below, so that sums over blocks are floors of stages: seconds of a micro-batch for forward, and for all of it;
    of a step besides; and of `steps` with all micro-batches and what is besides, if more is known of that. Each of those is at prices of its own:
    only seconds of one of them add up."""

    forward: np.ndarray
    whole: np.ndarray
    once: np.ndarray
    steps: tuple[np.ndarray, ...] = ()
    heavy: tuple[float, ...] = ()
    """Of each of `steps`, the part of a second more of computing that counts, where it may hide communication besides."""
    needs: Needs | None = None
    priced: Priced | None = None
    back: np.ndarray | None = None
    """Of `whole`, seconds that make gradients which earlier blocks wait for."""
    hops: tuple[float, float] = (0.0, 0.0)
    """Seconds of a micro-batch from a stage to the next one, and of its gradient back."""
    _known: dict[tuple[int, float], np.ndarray] = field(default_factory=dict)

    @property
    def input(self) -> np.ndarray:
        return np.zeros_like(self.whole) if self.back is None else np.minimum(self.back, self.whole - self.forward)

    def chain(self, split: bool) -> Chain:
        """All stages at their floors; `split`: where the weight part of backward may come later, any part of it."""
        rest = self.whole - self.forward
        return chain_of_blocks(self.forward, np.zeros_like(rest) if split else rest, weight=rest if split else (), once=self.once)

    def _steps(self, microbatches: int) -> list[tuple[np.ndarray, float]]:
        """Seconds of a step per block that add up, in ample memory, and what a second of a heavy op more adds."""
        return [(microbatches * self.whole + self.once, 1.0), *zip(self.steps, self.heavy or (0.0,) * len(self.steps), strict=True)]

    def work(self, course: Course) -> np.ndarray:
        """[stage, a, b]: seconds of a step that blocks a..b-1 take on their rank as that stage."""
        most = np.zeros(course.stages)
        for stages, loads in zip(course.of_rank, course.loads):
            most[stages] = loads[:, 0].max(0)
        levels, of = _levels(most)
        return np.stack([self._in_memory(course.microbatches, float(count)) for count in levels])[of]

    def whole_blocks(self, course: Course) -> float:
        """Seconds of a step that some rank works at least, since each block is on one rank."""
        ranks, steps = len(course.of_rank), [each for each, _ in self._steps(course.microbatches)]
        known = [fullest_rank(each, ranks) for each in steps]
        if (priced := self.priced) is not None:
            fewest = [float(_fullest(loads).min()) for loads in course.loads]  # micro-batches that any stage of a rank holds
            rows = [*(np.tile(each, (ranks, 1)) for each in steps), np.stack([priced.at(count) for count in fewest])]
            known.append(fullest_unlike(rows, [*(0.0 for _ in steps), priced.price * priced.limit]))
        return max(known)

    def _in_memory(self, microbatches: int, count: float) -> np.ndarray:
        """[a, b]: for a stage that holds `count` micro-batches, the highest over prices of a byte."""
        if (microbatches, count) not in self._known:
            steps = self._steps(microbatches)
            best = np.max([added(each) for each, _ in steps], axis=0)
            for price in self.needs.worth_trying(microbatches, count) if self.needs else ():
                kept = [each + self.needs.kept(price, microbatches, count, heavy) for each, heavy in steps]
                best = np.maximum(best, np.triu(np.max(added(np.array(kept)), axis=0) - price * self.needs.limit, 1))
            if (priced := self.priced) is not None:
                best = np.maximum(best, np.triu(added(priced.at(count)) - priced.price * priced.limit, 1))
            self._known[microbatches, count] = best
        return self._known[microbatches, count]

    def together(self, course: Course) -> list[Together]:
        """What the ranks take in sum, where one has several stages: memory is theirs together, so that no stage by itself says much."""
        if self.needs is None or all(len(stages) == 1 for stages in course.of_rank):
            return []
        held, ranks, needs = np.zeros(course.stages), len(course.of_rank), self.needs
        for stages, loads in zip(course.of_rank, course.loads):
            held[stages] = _fullest(loads)
        (levels, of), found = _levels(held), []
        for each, heavy in self._steps(course.microbatches):
            def even(price: float, heavy: float = heavy) -> float:
                """What memory adds if all stages hold the same."""
                return float(needs.kept(price, course.microbatches, held.mean(), heavy).sum() - ranks * price * needs.limit)

            price = max(needs.worth_trying(course.microbatches, held.mean()), key=even, default=0.0)
            if price and even(price) > 0.0:
                tables = np.stack([added(each + needs.kept(price, course.microbatches, float(count), heavy)) for count in levels])
                found.append(Together(tables[of], ranks * price * needs.limit))
        if (priced := self.priced) is not None:
            tables = np.stack([added(priced.at(float(count))) for count in levels])
            found.append(Together(tables[of], ranks * priced.price * priced.limit))
        return found


def _fullest(loads: np.ndarray) -> np.ndarray:
    """Micro-batches of each stage of a rank that wait for backward, when those are most."""
    return loads[loads[:, 0].sum(1).argmax(), 0]


def _levels(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A few numbers, and which of them each count is at least."""
    distinct = np.unique(counts)
    levels = distinct[np.unique(np.linspace(0, len(distinct) - 1, LEVELS).astype(int))]
    return levels, np.searchsorted(levels, counts, side="right") - 1
