"""What no plan is below: floors of blocks, and of the stages that they make."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoshard.search.partition import Chain, chain_of_blocks


@dataclass(frozen=True, eq=False)
class Floor:
    """Of every block, what no plan is below, so that sums over blocks are floors of stages: seconds of a micro-batch for forward, and for all of it;
    of a step besides; and of `steps` with all micro-batches and what is besides, if more is known of that. Each of those is at prices of its own:
    only seconds of one of them add up."""

    forward: np.ndarray
    whole: np.ndarray
    once: np.ndarray
    steps: tuple[np.ndarray, ...] = ()

    def chain(self, split: bool) -> Chain:
        """All stages at their floors; `split`: where the weight part of backward may come later, any part of it."""
        rest = self.whole - self.forward
        return chain_of_blocks(self.forward, np.zeros_like(rest) if split else rest, weight=rest if split else (), once=self.once)

    def work(self, microbatches: int) -> np.ndarray:
        """[a, b]: seconds of a step that blocks a..b-1 take on their rank."""
        each = np.stack([microbatches * self.whole + self.once, *self.steps])
        total = np.pad(np.cumsum(each, axis=1), ((0, 0), (1, 0)))
        return np.triu((total[:, None, :] - total[:, :, None]).max(axis=0))
