"""Models of transformers compute parts in float32 whatever their weights are (norms, softmax, rotary tables). Here those parts are float64 too, so that
two programs of such a model may differ by the rounding of float64 alone."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class InFloat64(TorchFunctionMode):
    """While it is active float32 that is asked for is float64: `x.float()`, `x.to(torch.float32)`, `softmax(x, dtype=torch.float32)`."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(_wide, args), **{name: _wide(value) for name, value in (kwargs or {}).items()})


def _wide(given: Any) -> Any:
    return torch.float64 if given is torch.float32 else given
