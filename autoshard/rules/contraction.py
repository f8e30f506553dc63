"""Products of matrices: a shard of a contracted dim leaves Partial sums."""
from __future__ import annotations

import torch

from autoshard.rules.notation import rule

aten = torch.ops.aten


def _matmul(text: str):
    return rule(text, family="matmul", partial="each")


RULES = {
    aten.mm.default: _matmul("m k, k n -> m n"),
    aten.bmm.default: _matmul("b m k, b k n -> b m n"),
    aten.mv.default: _matmul("m k, k -> m"),
    aten.dot.default: _matmul("k, k ->"),
}
