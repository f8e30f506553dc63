"""What a collective means, whoever carries it: what each rank sends to each, and what it makes of what it gets.

The first five ways of this table are all there is to run: one process that stands for all ranks, messages, and shared memory carry any
kind by them. Chunks are cut along dim 0, equally large but for `ROWS`.
"""
from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch

from autoshard.collectives.reduce_ops import combined


class Exchange(Enum):
    """(whether a rank sends all of its tensor to every rank, else one chunk to each; whether what a rank gets is combined, else
    put one after another, in order of ranks; whether it gets that of one rank alone; whether sizes of chunks are known at run time only:
    see all_to_all_rows.py)."""

    GATHER = (True, False)  # every rank gets all tensors
    TRANSPOSE = (False, False)  # rank r gets the r-th chunk of every tensor
    REDUCE = (True, True)  # every rank gets all tensors combined
    REDUCE_CHUNKS = (False, True)  # rank r gets the r-th chunks combined
    MIRROR = (True, False, True)  # rank r of n gets the tensor of rank n - 1 - r
    ROWS = (False, False, False, True)  # rank r gets as many rows of every tensor as its sender says

    def __init__(self, whole: bool, reduces: bool, paired: bool = False, sized: bool = False) -> None:
        self.whole, self.reduces, self.paired, self.sized = whole, reduces, paired, sized

    def rows(self, rows: int, n: int) -> int:
        """Rows of the result, from rows of the tensor that a rank has."""
        return rows * (n if self is Exchange.GATHER else 1) // (n if self is Exchange.REDUCE_CHUNKS else 1)

    def reference(self, tensors: Sequence[torch.Tensor], reduce_op: str) -> list[torch.Tensor]:
        """The results of a group's ranks, from their tensors, in one process. Ranks that get the same share it."""
        n = len(tensors)
        if self.paired:
            return list(reversed(tensors))
        got = [list(tensors)] if self.whole else [list(chunks) for chunks in zip(*(t.chunk(n) for t in tensors), strict=True)]
        made = [combined(pieces, reduce_op) if self.reduces else torch.cat(pieces) for pieces in got]
        return made * n if self.whole else made
