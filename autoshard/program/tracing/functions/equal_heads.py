"""Attention whose values have fewer features than its keys, or more (DeepSeek's latent attention: 192 and 128), as the kernel's op.

torch's fused kernel on CPUs, whose op the graph holds, takes heads of one size. With two sizes torch computes the scores as matrices of all
queries by all keys, which backward keeps: 4 GiB a layer for 128 heads and one sequence of 4,096. So heads are padded to the longer of both
while a model is traced: features of zeros add nothing to a score, and those of the result are cut off again. Libraries do the same before
they call their kernels.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

ATTENTION = F.scaled_dot_product_attention


class EqualHeads(TorchFunctionMode):
    """Calls attention with heads of one size."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is not ATTENTION:
            return func(*args, **(kwargs or {}))
        return _attention(*args, **(kwargs or {}))


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
               is_causal: bool = False, *, scale: float | None = None, **more: Any) -> torch.Tensor:
    have, want = value.shape[-1], query.shape[-1]
    if have == want or not _is_fused(query, attn_mask, dropout_p):
        return ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **more)
    query, key, value = (_padded(t, max(have, want)) for t in (query, key, value))
    scale = want ** -0.5 if scale is None else scale
    return ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **more)[..., :have]


def _is_fused(query: torch.Tensor, mask: torch.Tensor | None, dropout_p: float) -> bool:
    """Whether the fused kernel takes the call but for the sizes of its heads."""
    return query.ndim == 4 and dropout_p == 0.0 and not (mask is not None and mask.requires_grad)


def _padded(t: torch.Tensor, features: int) -> torch.Tensor:
    return F.pad(t, (0, features - t.shape[-1])) if t.shape[-1] < features else t
