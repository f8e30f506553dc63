"""Interleaved 1F1B (Megatron-LM): a rank has `chunks` stages, which divides the bubble by `chunks` and multiplies the transfers.

Any number of micro-batches will do: they go in rounds of at least p, as equal as possible.
"""
from __future__ import annotations

from autoshard.pipeline.action_lists.actions import Action, ActionTable, looped
from autoshard.pipeline.schedules.orders import alternate, by_rounds, rounds


def interleaved(ranks: int, microbatches: int, chunks: int = 2, warmup: int = 0) -> ActionTable:
    first_round = len(rounds(ranks, microbatches)[0])

    def actions(rank: int) -> tuple[Action, ...]:
        forwards = by_rounds(rank, ranks, range(chunks), microbatches)
        backwards = by_rounds(rank, ranks, range(chunks)[::-1], microbatches)
        return tuple(alternate(forwards, backwards, (chunks - 1) * first_round + 2 * (ranks - 1 - rank)))

    return ActionTable(tuple(actions(rank) for rank in range(ranks)), looped(ranks, chunks), microbatches)
