"""Table lookups and their backward: batch dims, feature dim, and the vocabulary itself.

A vocabulary-parallel lookup keeps the rows this rank holds and zeros elsewhere, so that the output is
Partial; the backward drops the gradients of rows that live on other ranks."""
from __future__ import annotations

from typing import Any

import torch

from autoshard.base.graph import Call
from autoshard.base.spec import PSUM, R
from autoshard.rules.family import Family
from autoshard.rules.notation import rule
from autoshard.rules.parts import addressed, adjust, input_axes, local_ids, output_axes, refuse_outside, zero_where_not
from autoshard.rules.types import LocalContext, Row

aten = torch.ops.aten
MAX_MODE = 2


def _embedding(ctx: LocalContext, weight: Any, indices: Any, padding_idx: int = -1, *flags: Any) -> Any:
    axes, table = input_axes(ctx, 0, 0), ctx.call.inputs[0]
    if not axes:
        ids = refuse_outside(indices, indices, table.unpadded[0], table.shape[0]) if table.unpadded else indices
        return aten.embedding.default(weight, ids, padding_idx, *flags)
    local, mine = local_ids(ctx, indices, axes, ctx.local_in(0)[0], table.true_shape[0])
    return zero_where_not(aten.embedding.default(weight, local), aten.unsqueeze.default(mine, -1))


def _backward_line(call: Call) -> str:
    """Counting how often a row occurs needs all indices, so then they stay whole."""
    return "... d, ...! -> v d" if call.argument("scale_grad_by_freq") else "... d, ... -> v d"


def _embedding_backward(ctx: LocalContext, grad: Any, indices: Any, num_weights: int, padding_idx: int,
                        by_freq: bool) -> Any:
    axes, rows = output_axes(ctx, 0, 0), ctx.local_out(0)[0]
    if not axes:
        return aten.embedding_dense_backward.default(grad, indices, rows, padding_idx, by_freq)
    local, mine = local_ids(ctx, indices, axes, rows)
    keep = aten.bitwise_and.Tensor(mine, aten.ne.Scalar(indices, padding_idx))
    kept = zero_where_not(grad, aten.unsqueeze.default(keep, -1))
    if by_freq:
        # Rows of other ranks must not count as occurrences of a clamped row: they get one of their own.
        local = aten.where.ScalarOther(mine, local, rows)
        whole = aten.embedding_dense_backward.default(kept, local, rows + 1, -1, True)
        return aten.slice.Tensor(whole, 0, 0, rows)
    return aten.embedding_dense_backward.default(kept, local, rows, -1, False)


def _bag_line(call: Call) -> str:
    """Bags are ragged, so only the feature dim splits."""
    rest = ("b! d" if len(call.output(i + 1).shape) == 2 else f"r{i}!" for i in range(len(call.outputs) - 1))
    return f"v! d, n!, o!, n! -> b! d, {', '.join(rest)}"


def _bag_row(call: Call, row: Row) -> Row:
    """What describes the bags is the same on every rank."""
    return Row(row.inputs, tuple(R if p == PSUM else p for p in row.outputs))


def _bag_backward_line(call: Call) -> str:
    names = [a.name for a in call.target._schema.arguments if "Tensor" in str(a.type)]
    ragged = ("b! d" if n == "maximum_indices" and call.argument("mode") == MAX_MODE else f"r{i}!"
              for i, n in enumerate(names[1:]))
    return f"b! d, {', '.join(ragged)} -> v! d"


RULES = {
    aten._embedding_bag.default: adjust(rule(_bag_line, family=Family.GATHER), _bag_row),
    aten._embedding_bag_forward_only.default: adjust(rule(_bag_line, family=Family.GATHER), _bag_row),
    aten._embedding_bag_backward.default: rule(_bag_backward_line, family=Family.GATHER),
    aten._embedding_bag_dense_backward.default: rule(_bag_backward_line, family=Family.GATHER),
    aten.embedding.default: addressed(rule("v d, ... -> ... d", family=Family.GATHER, local=_embedding), 0,
                                      lambda call: [0]),
    aten.embedding_dense_backward.default: rule(_backward_line, family=Family.GATHER, partial="each",
                                                local=_embedding_backward),
}
