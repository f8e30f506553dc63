"""Softmax, log-softmax and losses, split over the classes (vocabulary) as well as over the batch.

A mean is never Partial by itself: sum and count are reduced apart, or the shards' means are divided by
their number where all shards have equally many terms."""
from __future__ import annotations

from typing import Any

import torch

from autoshard.base.graph import Call
from autoshard.base.spec import R
from autoshard.rules.family import Family
from autoshard.rules.notation import rule
from autoshard.rules.parts import (
    accumulate_dtype,
    addressed,
    adjust,
    cast,
    dims_but,
    input_axes,
    local_ids,
    output_axes,
    partial_axes,
    shard_axes,
    zero_where_not,
)
from autoshard.rules.types import InnerCollective, LocalContext, Row, Rule

aten = torch.ops.aten
NONE, MEAN = 0, 1
IGNORE = -100


# Softmax ------------------------------------------------------------------------------------------------

def _along(call: Call, row: Row) -> tuple[int, ...]:
    """Logical dims of the softmax dim when `row` splits it, else none."""
    dims = tuple(call.inputs[0].logical_dims(call.argument("dim")))
    return dims if row.outputs[0] in dims else ()


def _softmax_row(call: Call, row: Row) -> Row:
    if not (drop := _along(call, row)):
        return row
    maximum = InnerCollective("all_reduce", "in0", "max", drop)
    total = InnerCollective("all_reduce", "in0", "sum", drop, accumulate_dtype(call.inputs[0].dtype))
    return Row(row.inputs, row.outputs, (maximum, total))


def _softmax_backward_row(call: Call, row: Row) -> Row:
    if not (drop := _along(call, row)):
        return row
    total = InnerCollective("all_reduce", "in0", "sum", drop, accumulate_dtype(call.inputs[0].dtype))
    return Row(row.inputs, row.outputs, (total,))


def _softmax(ctx: LocalContext, x: Any, dim: int, half_to_float: bool) -> Any:
    axes, call = input_axes(ctx, 0, dim), ctx.call
    if not axes:
        return call.target(x, dim, half_to_float)
    have, acc = call.inputs[0].dtype, accumulate_dtype(call.inputs[0].dtype)
    top = ctx.all_reduce(aten.amax.default(x, [dim], True), "max", axes)
    shifted = aten.sub.Tensor(cast(x, have, acc), top)
    e = aten.exp.default(shifted)
    total = ctx.all_reduce(aten.sum.dim_IntList(e, [dim], True), "sum", axes)
    if call.target is aten._softmax.default:
        out = aten.div.Tensor(e, total)
    else:
        out = aten.sub.Tensor(shifted, aten.log.default(total))
    return cast(out, acc, call.output().dtype)


def _softmax_backward(ctx: LocalContext, grad: Any, out: Any, dim: int, input_dtype: torch.dtype) -> Any:
    axes, call = input_axes(ctx, 0, dim), ctx.call
    if not axes:
        return call.target(grad, out, dim, input_dtype)
    acc = accumulate_dtype(call.inputs[0].dtype)
    grad = cast(grad, call.inputs[0].dtype, acc)
    out = cast(out, call.inputs[1].dtype, acc)
    if call.target is aten._softmax_backward_data.default:
        weighted = aten.mul.Tensor(grad, out)
        total = ctx.all_reduce(aten.sum.dim_IntList(weighted, [dim], True), "sum", axes)
        result = aten.sub.Tensor(weighted, aten.mul.Tensor(out, total))
    else:
        total = ctx.all_reduce(aten.sum.dim_IntList(grad, [dim], True), "sum", axes)
        result = aten.sub.Tensor(grad, aten.mul.Tensor(aten.exp.default(out), total))
    return cast(result, acc, call.output().dtype)


def _softmax_rule(tensors: int, local: Any, row: Any) -> Rule:
    def line(call: Call) -> str:
        dims = dims_but(call, ())
        return f"{', '.join([dims] * tensors)} -> {dims}"

    return adjust(rule(line, family=Family.REDUCTION, local=local), row)


def _whole_softmax_line(call: Call) -> str:
    dims = dims_but(call, (call.argument("dim"),))
    return f"{dims} -> {dims}"


# Negative log likelihood --------------------------------------------------------------------------------

def _spatial(call: Call) -> str:
    """Letters of the dims after the classes: none for nll_loss, two for nll_loss2d."""
    return " h w" if "2d" in str(call.target) else ""


def _nll_line(call: Call) -> str:
    hw = _spatial(call)
    out = f"n{hw}" if call.argument("reduction") == NONE else ""
    return f"n c{hw}, n{hw}, k! -> {out}, "


def _nll_row(call: Call, row: Row) -> Row:
    """The total weight comes out whole: it is the same for every class shard, and summed over the batch."""
    split = call.argument("reduction") != NONE and row.inputs[1] != R
    inner = (InnerCollective("all_reduce", "out1"),) if split else ()
    return Row(row.inputs, (row.outputs[0], R), inner)


def _nll(ctx: LocalContext, x: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
    batch = shard_axes(ctx, ctx.inputs[1]) if reduction != NONE else ()
    classes = input_axes(ctx, 0, 1)
    if not classes and not batch:
        return ctx.call.target(x, target, weight, reduction, ignore_index)
    if classes:
        loss, total = _nll_of_classes(ctx, classes, x, target, weight, ignore_index)
        if reduction == NONE:
            return loss, aten.new_zeros.default(total, [])
        loss = aten.sum.default(loss)
    else:
        loss, total = ctx.call.target(x, target, weight, 2, ignore_index)
    total = ctx.all_reduce(total, "sum", batch) if batch else total
    return (aten.div.Tensor(loss, total) if reduction == MEAN else loss), total


def _nll_of_classes(ctx: LocalContext, axes: tuple[int, ...], x: Any, target: Any, weight: Any,
                    ignore_index: int) -> tuple[Any, Any]:
    """Loss of the targets among this rank's classes (zero for others), and the weight of all targets."""
    valid, classes = aten.ne.Scalar(target, ignore_index), ctx.call.inputs[0].true_shape[1]
    counted = aten.masked_fill.Scalar(target, aten.eq.Scalar(target, ignore_index), 0)
    local, mine = local_ids(ctx, counted, axes, ctx.local_in(0)[1], classes)
    picked = aten.squeeze.dim(aten.gather.default(x, 1, aten.unsqueeze.default(local, 1)), 1)
    loss = aten.neg.default(zero_where_not(picked, aten.bitwise_and.Tensor(mine, valid)))
    dtype = ctx.call.output(1).dtype
    if weight is None:
        return loss, aten.sum.default(valid, dtype=dtype)
    each = zero_where_not(aten.index.Tensor(weight, [counted]), valid)
    return aten.mul.Tensor(loss, each), aten.sum.default(each)


def _nll_backward_line(call: Call) -> str:
    hw = _spatial(call)
    grad = f"n{hw}" if call.argument("reduction") == NONE else ""
    return f"{grad}, n c{hw}, n{hw}, c, -> n c{hw}"


def _nll_backward(ctx: LocalContext, grad: Any, x: Any, target: Any, weight: Any, reduction: int,
                  ignore_index: int, total: Any) -> Any:
    axes = output_axes(ctx, 0, 1)
    x = aten.contiguous.default(x)  # its layout is the result's, and nll_loss2d's kernel wants that contiguous
    if axes:
        local, mine = local_ids(ctx, target, axes, ctx.local_out(0)[1])
        keep = aten.bitwise_and.Tensor(mine, aten.ne.Scalar(target, ignore_index))
        target, ignore_index = aten.where.ScalarOther(keep, local, IGNORE), IGNORE
    return ctx.call.target(grad, x, target, weight, reduction, ignore_index, total)


def _of_classes(base: Rule, tensor: int) -> Rule:
    """Targets are positions along dim 1 of input `tensor`."""
    return addressed(base, tensor, lambda call: [1] if len(call.inputs[tensor].shape) > 1 else [])


# Elementwise losses -------------------------------------------------------------------------------------

def _elementwise(tensors: int) -> Rule:
    def line(call: Call) -> str:
        terms = ", ".join(["..."] * tensors)
        return f"{terms} -> {'...' if call.argument('reduction') == NONE else ''}"

    return rule(line, family=Family.REDUCTION, local=_mean_of_shards)


def _mean_of_shards(ctx: LocalContext, *args: Any, **kwargs: Any) -> Any:
    """Shards are equally large, so the mean is the sum of their means over their number."""
    out = ctx.call.target(*args, **kwargs)
    if ctx.call.argument("reduction") != MEAN:
        return out
    shards = ctx.ranks(partial_axes(ctx, ctx.outputs[0]))
    return out if shards == 1 else aten.div.Scalar(out, shards)


def _elementwise_backward(tensors: int) -> Rule:
    def line(call: Call) -> str:
        grad = "..." if call.argument("reduction") == NONE else ""
        return f"{grad}, {', '.join(['...'] * tensors)} -> ..."

    return rule(line, family=Family.POINTWISE, local=_spread_over_shards)


def _spread_over_shards(ctx: LocalContext, grad: Any, *args: Any, **kwargs: Any) -> Any:
    """The op divides the gradient of a mean by the local number of terms; the rest is divided here."""
    shards = ctx.ranks(shard_axes(ctx, ctx.outputs[0])) if ctx.call.argument("reduction") == MEAN else 1
    return ctx.call.target(grad if shards == 1 else aten.div.Scalar(grad, shards), *args, **kwargs)


RULES = {
    aten._softmax.default: _softmax_rule(1, _softmax, _softmax_row),
    aten._log_softmax.default: _softmax_rule(1, _softmax, _softmax_row),
    aten._safe_softmax.default: rule(_whole_softmax_line, family=Family.REDUCTION),
    aten._softmax_backward_data.default: _softmax_rule(2, _softmax_backward, _softmax_backward_row),
    aten._log_softmax_backward_data.default: _softmax_rule(2, _softmax_backward, _softmax_backward_row),
    **{op.default: _of_classes(adjust(rule(_nll_line, family=Family.GATHER, local=_nll), _nll_row), 0)
       for op in (aten.nll_loss_forward, aten.nll_loss2d_forward)},
    **{op.default: _of_classes(rule(_nll_backward_line, family=Family.GATHER, local=_nll_backward), 1)
       for op in (aten.nll_loss_backward, aten.nll_loss2d_backward)},
    **{op.default: _elementwise(2) for op in (aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss,
                                              aten.soft_margin_loss)},
    aten.binary_cross_entropy.default: _elementwise(3),
    aten.binary_cross_entropy_with_logits.default: _elementwise(4),
    **{op.default: _elementwise_backward(2) for op in (aten.mse_loss_backward, aten.smooth_l1_loss_backward,
                                                       aten.huber_loss_backward, aten.soft_margin_loss_backward)},
    aten.binary_cross_entropy_backward.default: _elementwise_backward(3),
}
