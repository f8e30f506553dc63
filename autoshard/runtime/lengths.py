"""Few lengths instead of many: every new shape is another variant of a compiled model, so batches are padded to the next of a few."""
from __future__ import annotations

from collections.abc import Mapping
from math import ceil, log2
from typing import Any

import torch
from torch.nn import functional as F

from autoshard.errors import UsageError


def bucket_length(length: int, waste: float = 0.125, multiple: int = 8) -> int:
    """The next length that is used: at most the share `waste` above `length`, but for rounding up to `multiple`. Between a power of two and
    the next there are 1 / waste of them, so 1 to 4,096 has about 9 / waste. Raises UsageError for numbers that make no sense."""
    if length < 1 or not 0.0 < waste <= 1.0 or multiple < 1:
        raise UsageError(f"bucket_length({length!r}, waste={waste!r}, multiple={multiple!r}): give a length and a multiple of at least 1, and a "
                         "share above 0 and at most 1")
    step = 2.0 ** (ceil(log2(length)) - 1) * waste  # of the power of two below
    size = max(multiple, multiple * round(step / multiple))
    return ceil(length / size) * size


def pad_to_bucket(batch: Mapping[str, Any], fill: Mapping[str, float], *, dim: int = 1, waste: float = 0.125, multiple: int = 8) -> dict[str, Any]:
    """The batch with the tensors that `fill` names padded at the end of `dim` to one common `bucket_length`, with these values:

        pad_to_bucket(batch, {"input_ids": 0, "attention_mask": 0, "labels": -100})

    Values that keep the loss as it is are the caller's business: labels that the loss ignores, a mask that hides the padding. Raises UsageError for a
    name that the batch lacks, and for tensors whose lengths differ."""
    missing = [name for name in fill if not isinstance(batch.get(name), torch.Tensor)]
    if missing:
        raise UsageError(f"the batch has no tensor {missing[0]!r}; it has {', '.join(map(str, batch))}")
    lengths = {name: batch[name].shape[dim] for name in fill}
    if len(set(lengths.values())) > 1:
        raise UsageError(f"tensors of one batch have different lengths in dim {dim}: {', '.join(f'{n} {k}' for n, k in lengths.items())}")
    wanted = bucket_length(next(iter(lengths.values())), waste, multiple)

    def padded(t: torch.Tensor, value: float) -> torch.Tensor:
        after = t.ndim - 1 - dim % t.ndim
        return F.pad(t, (*(0, 0) * after, 0, wanted - t.shape[dim]), value=value)

    return {name: padded(t, fill[name]) if name in fill else t for name, t in batch.items()}
