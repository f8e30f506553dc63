"""What no plan is below: floors of blocks, and of the stages that they make."""
from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from autoshard.pipeline.shapes.needs import Needs, added
from autoshard.search.partition import Chain, Course, Together, chain_of_blocks
from autoshard.search.partition.whole_blocks import fullest_rank

LEVELS = 6
"""Numbers of micro-batches in flight of which stages are bounded: each stage by the next smaller one."""


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
    _known: dict[tuple[int, float], np.ndarray] = field(default_factory=dict)

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
        return max(fullest_rank(each, len(course.of_rank)) for each, _ in self._steps(course.microbatches))

    def _in_memory(self, microbatches: int, count: float) -> np.ndarray:
        """[a, b]: for a stage that holds `count` micro-batches, the highest over prices of a byte."""
        if (microbatches, count) not in self._known:
            steps = self._steps(microbatches)
            best = np.max([added(each) for each, _ in steps], axis=0)
            for price in self.needs.worth_trying(microbatches, count) if self.needs else ():
                kept = [each + self.needs.kept(price, microbatches, count, heavy) for each, heavy in steps]
                best = np.maximum(best, np.triu(np.max(added(np.array(kept)), axis=0) - price * self.needs.limit, 1))
            self._known[microbatches, count] = best
        return self._known[microbatches, count]

    def together(self, course: Course) -> list[Together]:
        """What the ranks take in sum, where one has several stages: memory is theirs together, so that no stage by itself says much."""
        if self.needs is None or all(len(stages) == 1 for stages in course.of_rank):
            return []
        held, ranks, needs = np.zeros(course.stages), len(course.of_rank), self.needs
        for stages, loads in zip(course.of_rank, course.loads):
            held[stages] = loads[loads[:, 0].sum(1).argmax(), 0]
        (levels, of), found = _levels(held), []
        for each, heavy in self._steps(course.microbatches):
            def even(price: float, heavy: float = heavy) -> float:
                """What memory adds if all stages hold the same."""
                return float(needs.kept(price, course.microbatches, held.mean(), heavy).sum() - ranks * price * needs.limit)

            price = max(needs.worth_trying(course.microbatches, held.mean()), key=even, default=0.0)
            if price and even(price) > 0.0:
                tables = np.stack([added(each + needs.kept(price, course.microbatches, float(count), heavy)) for count in levels])
                found.append(Together(tables[of], ranks * price * needs.limit))
        return found


def _levels(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A few numbers, and which of them each count is at least."""
    distinct = np.unique(counts)
    levels = distinct[np.unique(np.linspace(0, len(distinct) - 1, LEVELS).astype(int))]
    return levels, np.searchsorted(levels, counts, side="right") - 1
