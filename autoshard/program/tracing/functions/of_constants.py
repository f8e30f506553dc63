"""What ops make of constants of the model (tensors among attributes and globals) may be written in place, as what they make of anything else."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autoshard import _torch


class OfConstants(TorchFunctionMode):
    """torch makes the results of an op functional where one of its inputs is. Here those of constants alone are made so as well.

    is_fresh   whether a fake tensor is what an op made, in memory of its own: a view of a constant stays one, for a write would be one
               into the constant"""

    def __init__(self, is_fresh: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.is_fresh = is_fresh

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return _torch.functional(out) if type(out) is _torch.FakeTensor and self.is_fresh(out) else out
