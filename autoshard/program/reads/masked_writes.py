"""`x[mask] = value` with a mask of bools and a value for all of its places, as a choice by `torch.where`.

Its gradient would read as many rows as the mask has places. T5Gemma2 puts the embedding of one token so; Ovis2 those of its markers."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class MaskedWrites(TorchFunctionMode):
    """Writes the same numbers as the write by index, to the same tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is not Tensor.__setitem__ or not _fills(*args):
            return func(*args, **(kwargs or {}))
        x, mask, value = args
        places = mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim))
        x.copy_(torch.where(places, value.to(x.dtype), x))
        return None


def _fills(x: Tensor, index: Any, value: Any) -> bool:
    """Whether one value, which needs a gradient, is written to every place of a mask: it has no dim that counts them."""
    if not (isinstance(index, Tensor) and isinstance(value, Tensor)) or index.dtype is not torch.bool or not value.requires_grad:
        return False
    rest = x.ndim - index.ndim
    return rest >= 0 and x.shape[:index.ndim] == index.shape and (value.ndim <= rest or value.ndim == rest + 1 and value.shape[0] == 1)
