"""How a collective combines what ranks send: one row per operation."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch

from autoshard.errors import LoweringError

COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add, "max": torch.maximum, "min": torch.minimum}
"""Two tensors -> a new one. With `out=` of the first they work in place."""


def combine_into(total: torch.Tensor, piece: torch.Tensor, op: str) -> torch.Tensor:
    """`total`, combined in place with `piece`."""
    return COMBINE[op](total, piece, out=total)  # type: ignore[call-arg]


def combined(pieces: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """All pieces combined, in order. Raises LoweringError for an unknown operation."""
    if op not in COMBINE:
        raise LoweringError(f"no reduction {op!r}; known are {', '.join(COMBINE)}")
    return reduce(COMBINE[op], pieces)
