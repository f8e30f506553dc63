"""`F.embedding_bag` with a matrix of ids as an op whose bags can be split (see rules/ops/embedding_bag.py)."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autoshard import _torch
from autoshard.rules.ops.embedding_bag import EMBEDDING_BAG

SUM, MEAN = "sum", "mean"


class EmbeddingBags(TorchFunctionMode):
    """Calls the op where it computes what torch does: sums and means of bags of equal length, but not in functorch's transforms, nor where the table
    is renormalised or its gradient is sparse or scaled."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding_bag and (found := _bags(*args, **kwargs)) is not None:
            return found
        return func(*args, **kwargs)


def _bags(input: Any = None, weight: Any = None, offsets: Any = None, max_norm: Any = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False,
          mode: str = MEAN, sparse: bool = False, per_sample_weights: Any = None, include_last_offset: bool = False,
          padding_idx: int | None = None) -> Tensor | None:
    """The result; None where torch is to be called, if only for its error. Arguments are named as torch names them."""
    given = [t for t in (input, weight, per_sample_weights) if t is not None]
    if not all(isinstance(t, Tensor) and t.ndim == 2 and not _torch.is_transformed(t) for t in given) or len(given) < 2 or not input.shape[1]:
        return None
    plain = offsets is None and max_norm is None and not scale_grad_by_freq and not sparse and input.dtype in (torch.int32, torch.int64)
    scaled = per_sample_weights is None or mode == SUM and per_sample_weights.shape == input.shape and per_sample_weights.dtype == weight.dtype
    if not plain or not scaled or mode not in (SUM, MEAN) or not (padding_idx is None or -len(weight) <= padding_idx < len(weight)):
        return None
    skip = None if padding_idx is None else padding_idx % len(weight)
    out = EMBEDDING_BAG(weight, input, per_sample_weights, skip)
    if mode == SUM:
        return out
    return out / (input.shape[1] if skip is None else (input != skip).sum(1, keepdim=True).clamp(min=1).to(out.dtype))
