"""The op that carries a model's checks of data into its graph."""
from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from autoshard.base.custom_op import custom_op
from autoshard.errors import CheckError


def _run(x: Tensor, truths: Sequence[Tensor], texts: Sequence[str]) -> Tensor:
    for truth, text in zip(truths, texts, strict=True):
        if not bool(truth):
            raise CheckError(f"a check in the model does not hold for this call: {text}")
    return x.clone()


CHECKED = custom_op("checked", "(Tensor x, Tensor[] truths, str[] texts) -> Tensor", _run, lambda x, truths, texts: x.new_empty(x.shape))
"""x, if all `truths` hold (each a bool of no dims); else a CheckError with the text that goes with the first that does not."""
