"""Tensors of padded shape and of true shape: parameters and their gradients, at the border of the graph."""
from __future__ import annotations

from collections.abc import Sequence

import torch

from autoshard.base.graph import TensorMeta


def longer(t: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """`t` with zeros behind, up to `shape`; itself where it has that shape."""
    if tuple(t.shape) == tuple(shape):
        return t
    out = t.new_zeros(tuple(shape))
    shorter(out, t.shape).copy_(t)
    return out


def shorter(t: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The leading part of `t`, a view."""
    for d, n in enumerate(shape):
        t = t if t.shape[d] == n else t.narrow(d, 0, n)
    return t


def with_pad(t: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """A whole tensor as the graph has it."""
    return longer(t, meta.shape) if meta.unpadded else t


def without_pad(t: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """A whole tensor as users have it."""
    return shorter(t, meta.unpadded) if meta.unpadded else t
