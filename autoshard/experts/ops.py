"""The ops: `EXPERTS` and `EXPERTS_BACKWARD` are what a traced graph has; the others are the steps that a rank runs (kernels.py)."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoshard.base.custom_op import custom_op, differentiable
from autoshard.experts import kernels
from autoshard.experts.kernels import combine_rows, place_rows

Empty = tuple[Tensor, ...]


_OF_IDS = "(Tensor ids, int experts, int pieces, int ways, int inner, int mine) -> Tensor"
SORT_ROWS = custom_op("sort_rows", _OF_IDS, kernels.sort_rows, lambda ids, experts, pieces, ways, inner, mine: ids.new_empty(ids.shape))
COUNT_ROWS = custom_op("count_rows", _OF_IDS, kernels.count_rows, lambda ids, experts, pieces, ways, inner, mine: ids.new_empty(experts))


def _run_shape(rows: Tensor, got: Tensor, ways: int, up: Tensor, down: Tensor, activation: str, gated: bool, kept: int) -> Empty:
    return torch.empty_like(rows), rows.new_empty(kept, up.shape[1]), rows.new_empty(len(up), dtype=torch.float64)


RUN_ROWS = custom_op("run_rows", "(Tensor rows, Tensor got, int ways, Tensor up, Tensor down, str activation, bool gated, int kept) "
                     "-> (Tensor, Tensor, Tensor)", kernels.run_rows, _run_shape)


def _run_backward_shape(grad: Tensor, rows: Tensor, weights: Tensor, got: Tensor, ways: int, up: Tensor, down: Tensor, saved: Tensor,
                        activation: str, gated: bool) -> Empty:
    return torch.empty_like(rows), torch.empty_like(weights), up.new_empty(up.shape), down.new_empty(down.shape)


RUN_ROWS_BACKWARD = custom_op(
    "run_rows_backward", "(Tensor grad, Tensor rows, Tensor weights, Tensor got, int ways, Tensor up, Tensor down, Tensor saved, "
    "str activation, bool gated) -> (Tensor, Tensor, Tensor, Tensor)", kernels.run_rows_backward, _run_backward_shape)

COMBINE_ROWS = custom_op("combine_rows", "(Tensor rows, Tensor order, Tensor? weights, int k, ScalarType dtype) -> Tensor", combine_rows,
                         lambda rows, order, weights, k, dtype: rows.new_empty(len(rows) // k, rows.shape[1], dtype=dtype))
PLACE_ROWS = custom_op("place_rows", "(Tensor values, Tensor order, int k) -> Tensor", place_rows,
                       lambda values, order, k: values.new_empty(len(values) // k, k))


def workspace(target: Any, args: tuple[Any, ...]) -> int:
    """Bytes that a step takes beside what it is given and makes, at most: as if all rows that there is room for came. 0 for other ops."""
    if target is RUN_ROWS:
        rows, _, ways, up, down = args[:5]
        widths = (2 if ways > 1 else 1) * rows.shape[1] + up.shape[1] + down.shape[2]  # sorted rows and results; both matmuls' inputs
    elif target is RUN_ROWS_BACKWARD:
        rows, ways, up, down = args[1], *args[4:7]
        widths = (4 if ways > 1 else 2) * rows.shape[1] + 2 * up.shape[1] + 3 * down.shape[2]
    else:
        return 0
    return int(len(rows) * widths * rows.dtype.itemsize)


# ---- of the graph: on whole tensors

def _experts(x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor, activation: str, gated: bool,
             capacity: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    k, all_here = ids.shape[1], (len(up), 1, 1, 1, 0)
    order, counts = kernels.sort_rows(ids, *all_here), kernels.count_rows(ids, *all_here)
    rows = order.reshape(-1)
    results, saved, held = kernels.run_rows(x.to(up.dtype)[rows // k], counts, 1, up, down, activation, gated, len(rows))
    return combine_rows(results, rows, weights, k, x.dtype), saved, held, order


def _experts_shape(x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor, activation: str, gated: bool, capacity: float) -> Empty:
    return x.new_empty(x.shape), up.new_empty(ids.numel(), up.shape[1]), up.new_empty(len(up), dtype=torch.float64), ids.new_empty(ids.shape)


def _experts_backward(grad: Tensor, x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor, saved: Tensor, held: Tensor,
                      order: Tensor, activation: str, gated: bool, capacity: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    k, order = ids.shape[1], order.reshape(-1)
    counts = kernels.count_rows(ids, len(up), 1, 1, 1, 0)
    token = order // k
    rows, row_weights, grad_up, grad_down = kernels.run_rows_backward(
        grad.to(up.dtype)[token], x.to(up.dtype)[token], weights.reshape(-1)[order], counts, 1, up, down, saved, activation, gated)
    return combine_rows(rows, order, None, k, x.dtype), place_rows(row_weights, order, k), grad_up, grad_down


def _experts_backward_shape(grad: Tensor, x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor, saved: Tensor, held: Tensor,
                            order: Tensor, activation: str, gated: bool, capacity: float) -> Empty:
    return tuple(t.new_empty(t.shape) for t in (x, weights, up, down))


EXPERTS = custom_op("experts", "(Tensor x, Tensor ids, Tensor weights, Tensor up, Tensor down, str activation, bool gated, float capacity) "
                    "-> (Tensor, Tensor, Tensor, Tensor)", _experts, _experts_shape)
"""x [T, d], ids and weights [T, k], up [experts, f or 2 f, d], down [experts, d, f] -> the sum over each token's experts of weight x
down(activation(up(x))) [T, d]; then what its gradient needs: results of the first matmul [T k, f or 2 f], rows of each expert [experts],
the order of rows [T, k].
`capacity`: rows that a rank takes where tokens travel, over those of a balanced load."""
EXPERTS_BACKWARD = custom_op(
    "experts_backward", "(Tensor grad, Tensor x, Tensor ids, Tensor weights, Tensor up, Tensor down, Tensor saved, Tensor held, "
    "Tensor order, str activation, bool gated, float capacity) -> (Tensor, Tensor, Tensor, Tensor)", _experts_backward, _experts_backward_shape)
"""Gradients of x, weights, up and down."""


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, ids, weights, up, down, *ctx.options = inputs
    ctx.save_for_backward(x, ids, weights, up, down, *output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 8
    dx, dweights, dup, ddown = EXPERTS_BACKWARD(grad, *ctx.saved_tensors, *ctx.options)
    return dx, None, dweights, dup, ddown, None, None, None


differentiable("experts", _save, _differentiate)
