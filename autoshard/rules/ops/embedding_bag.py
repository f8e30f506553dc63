"""Bags of equal length, `F.embedding_bag` of a model with ids [b, l] (see program/tracing/functions/embedding_bags.py).

torch's op takes ragged bags, one list of ids and where each bag begins, of which no rank can take a share. Two ops of our own take the ids as a
matrix: rows of bags split over ranks, and of the table any dim. Ranks that have some rows of it add up their parts.

    out[b] = sum over l of scale[b, l] table[ids[b, l]]"""
from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoshard.base.custom_op import custom_op, differentiable
from autoshard.base.graph import Call
from autoshard.rules.family import Family
from autoshard.rules.notation import rule
from autoshard.rules.parts import addressed, input_axes, local_ids, output_axes, refuse_outside
from autoshard.rules.types import LocalContext

aten = torch.ops.aten
ELSEWHERE = -1
"""The id of what another rank adds."""


def _forward(table: Tensor, ids: Tensor, scale: Tensor | None, skip: int | None) -> Tensor:
    if skip is None:
        return F.embedding_bag(ids, table, mode="sum", per_sample_weights=scale)
    flat, bags, scale = _kept(ids, scale, skip)
    starts = torch.searchsorted(bags, torch.arange(len(ids), dtype=ids.dtype, device=ids.device), out_int32=ids.dtype is torch.int32)
    return F.embedding_bag(flat, table, starts, mode="sum", per_sample_weights=scale)


def _backward(grad: Tensor, ids: Tensor, scale: Tensor | None, rows: int, skip: int | None) -> Tensor:
    flat, bags, scale = _kept(ids, scale, skip)
    if not flat.numel() or not grad.numel():  # torch's kernel fails on an empty list, as of a rank without any of the ids
        return grad.new_zeros(rows, grad.shape[1])
    unread = flat.new_empty(0)  # sizes of bags, for means, and which rows were the largest
    made: Tensor = aten._embedding_bag_dense_backward.default(grad, flat, bags, unread, unread, rows, False, 0, scale)
    return made


def _kept(ids: Tensor, scale: Tensor | None, skip: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Ids, the bag of each, and their scales, without the ids to skip: their rows may be inf or nan, which no scale of 0 hides."""
    bags = torch.arange(len(ids), dtype=ids.dtype, device=ids.device).unsqueeze(1).expand_as(ids)
    if skip is None:
        return ids.reshape(-1), bags.reshape(-1), scale if scale is None else scale.reshape(-1)
    keep = ids != skip
    return ids[keep], bags[keep], scale if scale is None else scale[keep]


EMBEDDING_BAG = custom_op("embedding_bag", "(Tensor weight, Tensor ids, Tensor? scale, int? skip) -> Tensor", _forward,
                          lambda table, ids, scale, skip: table.new_empty((ids.shape[0], table.shape[1])))
"""table [v, d], ids [b, l], scale [b, l] or None -> [b, d]. `skip`: an id that adds nothing."""
EMBEDDING_BAG_BACKWARD = custom_op("embedding_bag_backward", "(Tensor grad_out, Tensor ids, Tensor? scale, int num_weights, int? skip) -> Tensor",
                                   _backward, lambda grad, ids, scale, rows, skip: grad.new_empty((rows, grad.shape[1])))
"""The gradient of the table, [num_weights, d]."""


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    table, ids, scale, ctx.skip = inputs
    ctx.rows = table.shape[0]
    ctx.save_for_backward(ids, scale, table if scale is not None and scale.requires_grad else None)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
    ids, scale, table = ctx.saved_tensors
    of_table = of_scale = None
    if ctx.needs_input_grad[0]:
        if torch.is_grad_enabled():  # the gradient has a gradient
            each = grad.unsqueeze(1).expand(*ids.shape, -1)
            each = each if scale is None else each * scale.unsqueeze(2)
            each = each if ctx.skip is None else each.masked_fill((ids == ctx.skip).unsqueeze(2), 0.0)
            of_table = grad.new_zeros(ctx.rows, grad.shape[1]).index_add(0, ids.reshape(-1), each.reshape(-1, grad.shape[1]))
        else:
            of_table = EMBEDDING_BAG_BACKWARD(grad, ids, scale, ctx.rows, ctx.skip)
    if ctx.needs_input_grad[2]:
        of_scale = (F.embedding(ids, table) * grad.unsqueeze(1)).sum(2)
        of_scale = of_scale if ctx.skip is None else of_scale.masked_fill(ids == ctx.skip, 0.0)
    return of_table, None, of_scale, None


differentiable("embedding_bag", _save, _differentiate)


def workspace(target: Any, args: Any) -> int:
    """Bytes of temporaries that an op of this file has beside its results; 0 for other ops: the bag of every id, and what is left of ids to skip."""
    if target not in (EMBEDDING_BAG, EMBEDDING_BAG_BACKWARD):
        return 0
    (values, ids, scale), skip = args[:3], args[-1]
    lists = ids.numel() * ids.dtype.itemsize * (target is EMBEDDING_BAG_BACKWARD or skip is not None)
    left = ids.numel() * (2 * ids.dtype.itemsize + (scale is not None) * values.dtype.itemsize) * (skip is not None)
    return int(lists + left)


# Rules --------------------------------------------------------------------------------------------------

def _local(ctx: LocalContext, table: Any, ids: Any, scale: Any, skip: int | None) -> Any:
    axes, known = input_axes(ctx, 0, 0), ctx.call.inputs[0]
    if axes:
        ids, skip = _own_ids(ctx, ids, axes, ctx.local_in(0)[0], known.true_shape[0], skip), ELSEWHERE
    elif known.unpadded:
        ids = refuse_outside(ids, ids, known.unpadded[0], known.shape[0])
    return EMBEDDING_BAG(table, ids, scale, skip)


def _local_backward(ctx: LocalContext, grad: Any, ids: Any, scale: Any, rows: int, skip: int | None) -> Any:
    axes, size = output_axes(ctx, 0, 0), ctx.local_out(0)[0]
    if axes:
        ids, skip = _own_ids(ctx, ids, axes, size, rows, skip), ELSEWHERE
    return EMBEDDING_BAG_BACKWARD(grad, ids, scale, size, skip)


def _own_ids(ctx: LocalContext, ids: Any, axes: tuple[int, ...], size: int, whole: int, skip: int | None) -> Any:
    """Ids as those of this rank's rows of the table, of which there are `size`. What is no id of the whole table stays none of these."""
    local, mine = local_ids(ctx, ids, axes, size)
    mine = mine if skip is None else aten.bitwise_and.Tensor(mine, aten.ne.Scalar(ids, skip))
    return refuse_outside(aten.masked_fill.Scalar(local, aten.logical_not.default(mine), ELSEWHERE), ids, whole, size)


def _moved(call: Call, inputs: Any, outputs: Any) -> Any:
    """Forward reads a row of the table for each id, and not for each bag alone; backward adds one for each."""
    values, ids = call.inputs[:2]
    width = prod(inputs[0][d] for d in values.logical_dims(1)) * values.dtype.itemsize
    each, bags = prod(inputs[1]), prod(inputs[1][d] for d in ids.logical_dims(0))
    return (each - bags if call.target is EMBEDDING_BAG else 2 * each) * width


RULES = {
    EMBEDDING_BAG: replace(addressed(rule("v d, b l, b l -> b d", family=Family.GATHER, local=_local), 0, lambda call: [0]), moved=_moved),
    EMBEDDING_BAG_BACKWARD: replace(rule("b d, b l, b l -> v d", family=Family.GATHER, partial="each", local=_local_backward), moved=_moved),
}
