"""GPipe: all forwards, then all backwards. The ranks hold every micro-batch at once."""
from __future__ import annotations

from autoshard.pipeline.action_lists.actions import Action, ActionTable, looped


def gpipe(ranks: int, microbatches: int, chunks: int = 1, warmup: int = 0) -> ActionTable:
    tables = tuple(tuple(Action(kind, rank, m) for kind in ("F", "B") for m in range(microbatches)) for rank in range(ranks))
    return ActionTable(tables, looped(ranks, 1), microbatches)
