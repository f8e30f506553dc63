"""1F1B: after a warm-up every rank alternates one forward and one backward.

Rank r holds p - r micro-batches. `warmup` adds as many, at most p - 1 - r: with p - 1 a rank holds 2 (p - r) - 1 of them. These hide
transfers: without them a transfer of c per hop delays every backward by 2 c, however many micro-batches there are.
"""
from __future__ import annotations

from autoshard.pipeline.action_lists.actions import Action, ActionTable, looped
from autoshard.pipeline.schedules.orders import alternate


def one_f_one_b(ranks: int, microbatches: int, chunks: int = 1, warmup: int = 0) -> ActionTable:
    def actions(rank: int) -> tuple[Action, ...]:
        behind = ranks - 1 - rank
        pairs = [(rank, m) for m in range(microbatches)]
        return tuple(alternate(pairs, pairs, behind + min(warmup, behind)))

    return ActionTable(tuple(actions(rank) for rank in range(ranks)), looped(ranks, 1), microbatches)
