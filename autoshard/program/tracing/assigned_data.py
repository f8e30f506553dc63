"""`t.data = value`, as momentum encoders and clipped weights are written: torch does it without an op, so a trace would go on with the old data."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autoshard import _torch
from autoshard.program.tracing.tape import user_line

ASSIGN = torch.Tensor.data.__set__

class AssignedData(TorchFunctionMode):
    """From then on a traced tensor has the memory of the value, with all that is written there later, as in eager mode. Views of the tensor that were
    made before keep the old memory, and so do gradients.

    refuse   raises an error with a text"""

    def __init__(self, refuse: Callable[[str], None]) -> None:
        super().__init__()
        self.refuse = refuse
        self._assigned: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func != ASSIGN or not _torch.is_traced(args[0]):
            return func(*args, **(kwargs or {}))
        return self._assign(*args)

    def is_written(self, t: torch.Tensor) -> bool:
        """Whether a traced tensor was written in place, or its data assigned."""
        return id(t) in self._assigned or _torch.was_mutated(t)

    def _assign(self, t: Any, value: Any) -> None:
        if (value.shape, value.dtype) != (t.shape, t.dtype):
            return self.refuse(f"an assignment to .data changes a tensor of shape {tuple(t.shape)} and {t.dtype} to shape {tuple(value.shape)} and "
                               f"{value.dtype}{user_line()}; give the new tensor a name of its own")
        if not _torch.is_traced(value):
            return self.refuse(f"an assignment to .data makes a tensor share the memory of a constant of the model{user_line()}; write its numbers "
                               "instead: tensor.copy_(constant)")
        with torch.no_grad():
            value = value.detach() if value.stride() == t.stride() else torch.empty_like(t).copy_(value)
        t.elem = value.elem
        self._assigned[id(t)] = t
