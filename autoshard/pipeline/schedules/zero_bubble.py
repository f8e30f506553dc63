"""Zero bubble (Qi et al.): backward in two parts; the weight part W waits for nobody, so it fills what would be idle.

zb1p holds p micro-batches on every rank, as 1F1B does on the first; zb2p holds up to 2p - 1 and, with F = I = W, no rank waits between
its first action and its last one.
"""
from __future__ import annotations

from autoshard.pipeline.action_lists.actions import Action, ActionTable, looped
from autoshard.pipeline.schedules.orders import alternate, by_rounds, delay_weights, rounds


def zb1p(ranks: int, microbatches: int, chunks: int = 1, warmup: int = 0) -> ActionTable:
    return _zero_bubble(ranks, microbatches, chunks, 1)


def zb2p(ranks: int, microbatches: int, chunks: int = 1, warmup: int = 0) -> ActionTable:
    return _zero_bubble(ranks, microbatches, chunks, 2)


def _zero_bubble(ranks: int, microbatches: int, chunks: int, each_hop: int) -> ActionTable:
    """`each_hop`: forwards that the warm-up gains with every rank behind this one."""
    first_round = len(rounds(ranks, microbatches)[0])

    def actions(rank: int) -> tuple[Action, ...]:
        forwards = by_rounds(rank, ranks, range(chunks), microbatches)
        backwards = by_rounds(rank, ranks, range(chunks)[::-1], microbatches)
        merged = alternate(forwards, backwards, (chunks - 1) * first_round + each_hop * (ranks - 1 - rank))
        return tuple(delay_weights(merged, each_hop * rank))

    return ActionTable(tuple(actions(rank) for rank in range(ranks)), looped(ranks, chunks), microbatches)
