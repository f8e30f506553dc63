"""How a collective combines what ranks send: one row per operation."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch

from autoshard.errors import LoweringError

COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add, "max": torch.maximum, "min": torch.minimum}
"""Two tensors -> a new one."""


def combined(pieces: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """All pieces combined, in order. Raises LoweringError for an unknown operation."""
    if op not in COMBINE:
        raise LoweringError(f"no reduction {op!r}; known are {', '.join(COMBINE)}")
    return reduce(COMBINE[op], pieces)
