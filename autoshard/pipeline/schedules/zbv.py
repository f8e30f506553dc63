"""ZB-V (Qi et al.): zero bubble on two stages a rank, placed as a V, which holds no more than 1F1B's first rank on any rank.

The last stage is on the first rank, so the first backward comes back by itself and W fills the rest. Without bubbles only where
F = I = W; with fewer than 2p - 1 micro-batches it is the schedule of 2p - 1 without those that are too many.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autoshard.pipeline.action_lists.actions import Action, ActionTable, Kind, folded


def zbv(ranks: int, microbatches: int, chunks: int = 2, warmup: int = 0) -> ActionTable:
    planned = max(microbatches, 2 * ranks - 1)
    tables = (_actions(rank, ranks, planned) for rank in range(ranks))
    kept = tuple(tuple(a for a in actions if (a.microbatch or 0) < microbatches) for actions in tables)
    return ActionTable(kept, folded(ranks), microbatches)


def _actions(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Micro-batches of each kind of a stage come in their order, so a phase is words: which kinds of which stage, how many times."""
    down, up = rank, 2 * ranks - 1 - rank
    done: Counter[tuple[str, int]] = Counter()
    for kind, stage in _words(rank, ranks, microbatches):
        at = down if stage == "down" else up
        yield Action(kind, at, done[kind, at])
        done[kind, at] += 1


def _words(rank: int, ranks: int, microbatches: int) -> Iterator[tuple[Kind, str]]:
    behind = ranks - rank
    ahead = 2 * ranks - 1 - rank  # forwards of the first stage when the steady state begins
    steady = microbatches - ranks  # turns between warm-up and drain
    yield from [("F", "down")] * (2 * behind - 1)
    yield from [("F", "up"), ("F", "down")] * rank
    yield from [("F", "up"), ("I", "up"), ("W", "up")] * behind
    for turn in range(steady):
        if ahead + turn < microbatches:
            yield "F", "down"
        yield from [("I", "down"), ("W", "down"), ("F", "up"), ("I", "up"), ("W", "up")]
    yield from [("I", "down"), ("I", "up")] * rank
    yield from [("I", "down"), ("W", "down")] * behind
    yield from [("W", "up")] * rank
    yield from [("W", "down")] * rank
