"""Random rows of blocks, schedules for them, and the best partition by trying all."""
from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import numpy as np

from autoshard.pipeline.action_lists.actions import ActionTable
from autoshard.pipeline.schedules import SCHEDULES, make_schedule
from autoshard.pipeline.shapes.partitions import course_of, price_by_play
from autoshard.search.partition import Chain, Course, bounds, chain_of_blocks, rank_bytes


@dataclass(frozen=True)
class Case:
    chain: Chain
    table: ActionTable
    name: str

    @property
    def course(self) -> Course:
        return course_of(self.table)


def random_case(seed: int, most_blocks: int = 8, most_stages: int = 4) -> Case:
    """Stages of up to four blocks' difference, transfers from none to a third of a block, any schedule, 1 to 12 micro-batches."""
    rng = random.Random(seed)
    blocks = rng.randint(2, most_blocks)
    name = rng.choice(list(SCHEDULES))
    chunks = rng.choice([c for c in (1, 2) if c in SCHEDULES[name].chunks])
    ranks = rng.randint(1, max(1, min(most_stages, blocks) // chunks))
    blocks = max(blocks, ranks * chunks)
    hop = rng.choice([0, 0.1, 0.3])
    forward = [rng.uniform(0.5, 1.5) * rng.choice([1, 1, 1, 3]) for _ in range(blocks)]
    chain = chain_of_blocks(
        forward, [f * rng.uniform(0.6, 1.4) for f in forward], weight=[f * rng.uniform(0.6, 1.2) for f in forward],
        once=[rng.choice([0, 0, 1]) * rng.uniform(0, 2) for _ in forward], stored=[rng.uniform(0.5, 3) for _ in forward],
        peak=[rng.uniform(0, 1) for _ in forward], saved=[rng.uniform(0.3, 1) for _ in forward], between=[rng.uniform(0, 0.3) for _ in forward],
        hop_forward=[hop * rng.uniform(0.5, 1.5) for _ in range(blocks - 1)], hop_backward=[hop * rng.uniform(0.5, 1.5) for _ in range(blocks - 1)])
    warmup = rng.choice([0, 0, 1, 3]) if SCHEDULES[name].takes_warmup else 0
    return Case(chain if SCHEDULES[name].split_backward else chain.undivided(), make_schedule(name, ranks, rng.randint(1, 12), chunks, warmup), name)


def all_cuts(blocks: int, stages: int) -> np.ndarray:
    return np.array([(0, *cuts, blocks) for cuts in itertools.combinations(range(1, blocks), stages - 1)])


def by_trying_all(case: Case, memory_limit: float = np.inf) -> tuple[float, np.ndarray, np.ndarray]:
    """The least price of a partition that fits; and of all that fit, their bounds and their prices."""
    cuts = all_cuts(case.chain.blocks, case.table.stages)
    cuts = cuts[(rank_bytes(case.chain, case.course, cuts) <= memory_limit).all(1)]
    prices = price_by_play(case.chain, case.table)(cuts)
    return float(prices.min(initial=np.inf)), bounds(case.chain, case.course, cuts), prices
