"""Distances between the rows of two matrices: rows of both split, with any batch dims. Priced as the matrix product that they
mostly are."""
from __future__ import annotations

from typing import Any

import torch

from autoshard.base.graph import Call
from autoshard.rules.family import Family
from autoshard.rules.notation import rule
from autoshard.rules.parts import contiguous_inputs
from autoshard.rules.types import LocalContext

aten = torch.ops.aten
PRODUCT, DIRECT = 1, 2
"""Ways to compute a Euclidean distance: through a matrix product, or from differences."""
MANY_ROWS = 25
"""torch takes the product by default where either matrix has more rows."""


def _forward_line(call: Call) -> str:
    """Only the 1-norm is a sum over the dims of a row."""
    m = "m" if call.argument("p") == 1 else "m!"
    return f"... p {m}, ... r {m} -> ... p r"


def _forward(ctx: LocalContext, x1: Any, x2: Any, p: float, mode: int | None) -> Any:
    """A shard takes the way the whole takes: the two round differently where rows are close."""
    if not mode:
        mode = PRODUCT if max(m.shape[-2] for m in ctx.call.inputs) > MANY_ROWS else DIRECT
    return aten._cdist_forward.default(x1, x2, p, mode)


RULES = {
    aten._cdist_forward.default: rule(_forward_line, family=Family.MATMUL, local=_forward),
    aten._cdist_backward.default: rule("... p r, ~... p m, ~... r m, ~... p r -> ... p m", family=Family.MATMUL, partial="each",
                                       local=contiguous_inputs),
}
