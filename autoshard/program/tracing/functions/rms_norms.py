"""`F.rms_norm` as one op, for which torch has a kernel on GPUs only (see rules/ops/rms_norm.py)."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autoshard import _torch
from autoshard.rules.ops.rms_norm import RMS_NORM
from autoshard.rules.parts import accumulate_dtype

NORMS = (F.rms_norm, torch.rms_norm)


class RMSNorms(TorchFunctionMode):
    """Calls the op where it computes what torch does: anywhere but in functorch's transforms, under autocast and where dtypes are mixed."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in NORMS and (taken := _taken(*args, **kwargs)) is not None:
            return RMS_NORM(_kept(taken[0]), *taken[1:])[0]
        return func(*args, **kwargs)


def _kept(x: Tensor) -> Tensor:
    """What backward is to read. A model may write into the input after the norm where torch's formula does not keep it: in half precision torch keeps
    a wider copy, and for the weight alone the result. Of such an input the op gets a copy, which the graph then drops."""
    wide = accumulate_dtype(x.dtype) != x.dtype
    return x.clone() if torch.is_grad_enabled() and (wide or not x.requires_grad) else x


def _taken(input: Any = None, normalized_shape: Any = None, weight: Any = None, eps: float | None = None, **more: Any) -> tuple[Any, ...] | None:
    """The op's arguments; None where torch is to be called, if only for its error. Arguments are named as torch names them."""
    if more or not isinstance(input, Tensor) or not input.is_floating_point() or torch.is_autocast_enabled(input.device.type):
        return None
    if not isinstance(normalized_shape, Sequence) or not all(isinstance(n, int) for n in normalized_shape):
        return None
    shape = tuple(normalized_shape)
    if not shape or tuple(input.shape[-len(shape):]) != shape or _torch.is_transformed(input):
        return None
    if weight is not None and (tuple(weight.shape) != shape or weight.dtype != input.dtype or _torch.is_transformed(weight)):
        return None
    return input, shape, weight, torch.finfo(accumulate_dtype(input.dtype)).eps if eps is None else eps
