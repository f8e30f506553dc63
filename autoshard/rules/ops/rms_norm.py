"""RMS norm as one op: `F.rms_norm` of a model (see program/tracing/functions/rms_norms.py).

torch has a kernel for it on GPUs only. On CPUs it computes the formula in eight ops, of which backward makes about twenty and keeps several
tensors as large as the input. Two ops of our own stand in the graph instead; backward keeps the input and one number per row. With r the
reciprocal root of a row's mean square, N its length, g the gradient, w the weight (Zhang and Sennrich, "Root Mean Square Layer
Normalization", arXiv 1910.07467):

    out = x r w        dx = r g w - x r^3 sum(g w x) / N        dw = sum over rows of g x r

A rank may hold a part of every row. Then it sums squares, or g w x, over its part, and one all-reduce of a number per row makes the whole sums.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from autoshard.base.custom_op import custom_op, differentiable
from autoshard.base.graph import Call
from autoshard.base.spec import R
from autoshard.rules.family import Family
from autoshard.rules.notation import rule
from autoshard.rules.parts import accumulate_dtype, adjust, cast, layer_dims
from autoshard.rules.types import InnerCollective, LocalContext, Row

aten = torch.ops.aten


# Kernels of CPUs ----------------------------------------------------------------------------------------

def _forward(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    _check(x, shape)
    wide = x.to(accumulate_dtype(x.dtype)).contiguous()  # so is torch's result
    norm = torch.linalg.vector_norm(wide, 2, _dims(shape), keepdim=True)  # its kernel reads at full speed, that of pow(2).mean does not
    rstd = norm.square_().div_(prod(shape)).add_(eps).rsqrt_()
    out = wide * rstd
    return (out if weight is None else out.mul_(weight)).to(x.dtype), rstd


def _backward(grad: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, weight: Tensor | None, mask: Sequence[bool]) -> tuple[Any, Any]:
    """Layer norm's kernel about a mean of zero subtracts, beside what RMS norm does, r times the mean of g w: it is added again."""
    _check(x, shape)
    have, n = x.dtype, prod(shape)
    grad, x = (t.to(rstd.dtype).contiguous() for t in (grad, x))
    if not mask[0] or not n:
        return torch.zeros_like(x, dtype=have) if mask[0] else None, _weight_gradient(grad * x * rstd, shape) if mask[1] else None
    rstd, weight = rstd.contiguous(), weight if weight is None else weight.to(rstd.dtype)
    dx, dw, _ = aten.native_layer_norm_backward.default(grad, x, shape, torch.zeros_like(rstd), rstd, weight, None, [True, mask[1], False])
    sums = grad.view(-1, n).sum(-1) if weight is None else grad.view(-1, n) @ weight.reshape(n)
    dx.view(-1, n).add_((sums * rstd.view(-1)).div_(n).unsqueeze_(-1))
    return dx.to(have), dw if mask[1] else None


def _weight_gradient(rows: Tensor, shape: Sequence[int]) -> Tensor:
    return rows.reshape(-1, *shape).sum(0) if prod(shape) else rows.new_zeros(shape)


def _check(x: Tensor, shape: Sequence[int]) -> None:
    if tuple(x.shape[-len(shape):]) != tuple(shape):
        raise RuntimeError(f"rms_norm: input of shape {tuple(x.shape)} does not end with normalized_shape {tuple(shape)}")


def _dims(shape: Sequence[int]) -> list[int]:
    return list(range(-len(shape), 0))


def _statistics(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x.new_empty((*x.shape[:x.ndim - len(shape)], *(1 for _ in shape)), dtype=accumulate_dtype(x.dtype))


RMS_NORM = custom_op("rms_norm", "(Tensor input, int[] normalized_shape, Tensor? weight, float eps) -> (Tensor, Tensor)", _forward,
                     lambda x, shape, weight, eps: (x.new_empty(x.shape), _statistics(x, shape)))
"""x [..., *shape], weight [*shape] -> out [..., *shape], r [..., 1, ...] in float32 where x is in half precision."""
RMS_NORM_BACKWARD = custom_op(
    "rms_norm_backward", "(Tensor grad_out, Tensor input, int[] normalized_shape, Tensor rstd, Tensor? weight, bool[2] output_mask) "
    "-> (Tensor, Tensor)", _backward,
    lambda grad, x, shape, rstd, weight, mask: (x.new_empty(x.shape) if mask[0] else None, rstd.new_empty(shape) if mask[1] else None))
"""Gradients of x, and of the weight in the dtype of r: so they are summed over ranks before they are rounded."""


def workspace(target: Any, args: Sequence[Any]) -> int:
    """Bytes of temporaries that an op of this file has beside its results; 0 for other ops. Half precision is widened; backward has three
    numbers a row."""
    if target not in (RMS_NORM, RMS_NORM_BACKWARD):
        return 0
    is_backward = target is RMS_NORM_BACKWARD
    x, shape = args[is_backward], args[1 + is_backward]
    dtype = accumulate_dtype(x.dtype)
    wide, rows = dtype.itemsize * x.numel(), dtype.itemsize * (x.numel() // max(prod(shape), 1))
    return int((2 + is_backward) * wide * (dtype != x.dtype) + 3 * rows * is_backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.shape, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    x, weight, rstd = ctx.saved_tensors
    mask = (ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[2])
    if grad is None or not any(mask):
        return (None,) * 4
    if torch.is_grad_enabled():  # the gradient has a gradient
        dx, dw = _backward_decomposed(grad, x, ctx.shape, _decomposed(x, ctx.shape, weight, ctx.eps)[1], weight, mask)
    else:
        dx, dw = RMS_NORM_BACKWARD(grad, x, ctx.shape, rstd, weight, mask)
    return dx, None, dw if dw is None else dw.to(weight.dtype), None


differentiable("rms_norm", _save, _differentiate)


# What stands for them elsewhere -------------------------------------------------------------------------

def _on_gpu(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    out, rstd = aten._fused_rms_norm.default(x, shape, weight, eps)
    return out, rstd


def _backward_on_gpu(grad: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, weight: Tensor | None,
                     mask: Sequence[bool]) -> tuple[Any, Any]:
    dx, dw = aten._fused_rms_norm_backward.default(grad.contiguous(), x.contiguous(), shape, rstd.contiguous(), weight, mask)
    return dx, dw if dw is None else dw.to(rstd.dtype)


ON_GPU: dict[Any, Callable[..., Any]] = {RMS_NORM: _on_gpu, RMS_NORM_BACKWARD: _backward_on_gpu}


def _by_parts(x: Any, dtypes: Sequence[torch.dtype], shape: Sequence[int], weight: Any, eps: float, whole: int, total: Any) -> tuple[Any, Any]:
    """The formula in ops of torch. `whole`: elements of a row on all ranks; `total`: sum of a rank's numbers -> that of all."""
    have, acc = dtypes
    x = cast(x, have, acc)
    squares = total(aten.sum.dim_IntList(aten.mul.Tensor(x, x), _dims(shape), True))
    rstd = aten.rsqrt.default(aten.add.Scalar(aten.div.Scalar(squares, whole), eps))
    out = aten.mul.Tensor(x, rstd)
    return cast(out if weight is None else aten.mul.Tensor(out, weight), acc, have), rstd


def _backward_by_parts(grad: Any, x: Any, dtypes: Sequence[torch.dtype], ndim: int, shape: Sequence[int], rstd: Any, weight: Any,
                       mask: Sequence[bool], whole: int, total: Any) -> tuple[Any, Any]:
    have, acc = dtypes
    grad, x = cast(grad, have, acc), aten.mul.Tensor(cast(x, have, acc), rstd)
    dx, dw = None, aten.mul.Tensor(grad, x) if mask[1] else None
    if mask[0]:
        grad = grad if weight is None else aten.mul.Tensor(grad, weight)
        along = total(aten.sum.dim_IntList(aten.mul.Tensor(grad, x), _dims(shape), True))
        pulled = aten.mul.Tensor(x, aten.div.Scalar(along, whole))
        dx = cast(aten.mul.Tensor(aten.sub.Tensor(grad, pulled), rstd), acc, have)
    lead = list(range(ndim - len(shape)))
    return dx, aten.sum.dim_IntList(dw, lead) if lead and mask[1] else dw


def _decomposed(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    return _by_parts(x, (x.dtype, accumulate_dtype(x.dtype)), shape, weight, eps, prod(shape), lambda part: part)


def _backward_decomposed(grad: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, weight: Tensor | None,
                         mask: Sequence[bool]) -> tuple[Any, Any]:
    return _backward_by_parts(grad, x, (x.dtype, rstd.dtype), x.ndim, shape, rstd, weight, mask, prod(shape), lambda part: part)


DECOMPOSED = {RMS_NORM: _decomposed, RMS_NORM_BACKWARD: _backward_decomposed}
"""For compilers that fuse."""


# Rules --------------------------------------------------------------------------------------------------

def _line(call: Call, mark: str = "") -> str:
    x, y, r = layer_dims(call, mark)
    return f"{x}, {y} -> {x}, {r}"


def _backward_line(call: Call, mark: str = "") -> str:
    x, y, r = layer_dims(call, mark)
    return f"{x}, {x}, {r}, {y} -> {x}, {y}"


def _normed(call: Call) -> tuple[int, ...]:
    """Logical dims of the first input that are normalised."""
    x = call.inputs[0]
    return tuple(d for t in _dims(call.argument("normalized_shape")) for d in x.logical_dims(len(x.shape) + t))


def _row(call: Call, row: Row) -> Row:
    if row.inputs[0] not in (drop := _normed(call)):
        return row
    total = InnerCollective("all_reduce", "in0", "sum", drop, accumulate_dtype(call.inputs[0].dtype))
    forward = call.target is RMS_NORM
    outputs = (row.outputs[0], R) if forward else row.outputs
    return replace(row, outputs=outputs, inner=(total,) if forward or call.argument("output_mask")[0] else ())


def _axes(ctx: LocalContext) -> tuple[int, ...]:
    return tuple(a for d in _normed(ctx.call) for a in ctx.axes(ctx.inputs[0], d))


def _dtypes(ctx: LocalContext) -> tuple[torch.dtype, torch.dtype]:
    have = ctx.call.inputs[0].dtype
    return have, accumulate_dtype(have)


def _local(ctx: LocalContext, x: Any, shape: Sequence[int], weight: Any, eps: float) -> Any:
    if not (axes := _axes(ctx)):
        return ctx.call.target(x, shape, weight, eps)
    return _by_parts(x, _dtypes(ctx), shape, weight, eps, prod(shape), lambda part: ctx.all_reduce(part, "sum", axes))


def _local_backward(ctx: LocalContext, grad: Any, x: Any, shape: Sequence[int], rstd: Any, weight: Any, mask: Sequence[bool]) -> Any:
    if not (axes := _axes(ctx)):
        return ctx.call.target(grad, x, shape, rstd, weight, mask)
    return _backward_by_parts(grad, x, _dtypes(ctx), len(ctx.call.inputs[0].shape), shape, rstd, weight, mask, prod(shape),
                              lambda part: ctx.all_reduce(part, "sum", axes))


RULES = {
    RMS_NORM: adjust(rule(_line, family=Family.NORM, local=_local), _row),
    RMS_NORM_BACKWARD: adjust(rule(_backward_line, family=Family.NORM, local=_local_backward), _row),
    aten._fused_rms_norm.default: rule(partial(_line, mark="!"), family=Family.NORM),
    aten._fused_rms_norm_backward.default: rule(partial(_backward_line, mark="!"), family=Family.NORM),
}
