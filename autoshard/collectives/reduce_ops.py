"""How a collective combines what ranks send: one row per operation."""
from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch

from autoshard.errors import LoweringError

COMBINE: dict[str, Any] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
"""Two tensors -> a new one, or `out`. The names are those of torch.distributed.ReduceOp in small letters."""


def combined(pieces: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """All pieces combined, in order. Raises LoweringError for an unknown operation."""
    if op not in COMBINE:
        raise LoweringError(f"no reduction {op!r}; known are {', '.join(COMBINE)}")
    return reduce(COMBINE[op], pieces)


def combine_into(total: torch.Tensor, piece: torch.Tensor, op: str) -> torch.Tensor:
    """`total`, overwritten with what both make."""
    made: torch.Tensor = COMBINE[op](total, piece, out=total)
    return made
