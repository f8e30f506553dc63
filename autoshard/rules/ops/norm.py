"""Normalisations. Layer and group norm split over everything that is not normalised (so does RMS norm, see rms_norm.py); batch norm also
over the batch it normalises, with the statistics of the whole batch."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import torch

from autoshard.base.graph import Call, TensorMeta
from autoshard.base.spec import R
from autoshard.rules.family import Family
from autoshard.rules.notation import rule
from autoshard.rules.parts import accumulate_dtype, adjust, cast, contiguous_inputs, input_axes, layer_dims, letters
from autoshard.rules.types import InnerCollective, LocalContext, Row, Rule

aten = torch.ops.aten
MOMENTS = torch.float64
"""What the moments of a batch are summed in."""


# Layer norm ---------------------------------------------------------------------------------------------

def _layer_norm_line(call: Call) -> str:
    x, y, s = layer_dims(call)
    return f"{x}, {y}, {y} -> {x}, {s}, {s}"


def _layer_norm_backward_line(call: Call) -> str:
    x, y, s = layer_dims(call)
    return f"{x}, {x}, {s}, {s}, {y}, {y} -> {x}, {y}, {y}"


def _layer_norm_backward(ctx: LocalContext, grad: Any, x: Any, shape: Any, mean: Any, rstd: Any, *rest: Any) -> Any:
    """The kernel takes the memory of the statistics for contiguous, and is silently wrong where it is not."""
    return ctx.call.target(grad, x, shape, aten.contiguous.default(mean), aten.contiguous.default(rstd), *rest)


# Group norm ---------------------------------------------------------------------------------------------

def _group_norm_line(call: Call) -> str:
    """The letter c is channels in the input and groups in the statistics: both must split."""
    x, c = _channel_term(call.tensor("input")), _groups(call)
    return f"{x}, {c}, {c} -> {x}, n {c}, n {c}"


def _group_norm_backward_line(call: Call) -> str:
    x, c = _channel_term(call.tensor("input")), _groups(call)
    return f"{x}, {x}, n {c}, n {c}, {c} -> {x}, {c}, {c}"


def _groups(call: Call) -> str:
    """A single group does not split, and its dim of size 1 would not say so."""
    return "c!" if call.argument("group") == 1 else "c"


def _group_norm(ctx: LocalContext, x: Any, weight: Any, bias: Any, n: int, c: int, pixels: int, group: int,
                eps: float) -> Any:
    """The kernels take the memory of their inputs for contiguous: the backward is silently wrong where it is not."""
    n, c = ctx.local_in(0)[:2]
    x = aten.contiguous.default(x)
    return ctx.call.target(x, weight, bias, n, c, pixels, group // ctx.ranks(input_axes(ctx, 0, 1)), eps)


def _group_norm_backward(ctx: LocalContext, grad: Any, x: Any, mean: Any, rstd: Any, weight: Any, n: int, c: int,
                         pixels: int, group: int, output_mask: Any) -> Any:
    n, c = ctx.local_in(0)[:2]
    group //= ctx.ranks(input_axes(ctx, 0, 1))
    grad, x = aten.contiguous.default(grad), aten.contiguous.default(x)
    return ctx.call.target(grad, x, mean, rstd, weight, n, c, pixels, group, output_mask)


# Batch norm ---------------------------------------------------------------------------------------------

def _channel_term(meta: TensorMeta) -> str:
    return f"n c {letters('p', len(meta.shape) - 2, '!')}"


def _stat_term(meta: TensorMeta | None, name: str, channels: int) -> str:
    """Statistics are one number per channel; in eval mode they are empty, reserves are opaque."""
    if meta is None:
        return ""
    return "c" if meta.shape == (channels,) else letters(name, len(meta.shape), "!")


def _batch_norm_line(call: Call) -> str:
    """All variants: the tensors with dims are input-like, the others one number per channel."""
    x = call.tensor("input")
    terms = {"input": _channel_term(x), "grad_out": _channel_term(x)}
    names = [a.name for a in call.target._schema.arguments if "Tensor" in str(a.type)]
    left = [terms.get(n) or _stat_term(call.given(n), n, x.shape[1]) for n in names]
    right = [terms["input"], *(_stat_term(m, f"r{i}_", x.shape[1]) for i, m in enumerate(call.outputs[1:]))]
    return f"{', '.join(left)} -> {', '.join(right)}"


def _in_training(call: Call) -> bool:
    """Whether this call normalises with the statistics of its own batch."""
    names = {a.name for a in call.target._schema.arguments}
    return next((call.argument(n) for n in ("training", "train", "update") if n in names),
                call.target is aten._batch_norm_with_update_functional.default)


def _batch_norm_row(call: Call, row: Row) -> Row:
    """A split batch. Training: one all-reduce of two numbers per channel, and every statistic comes out
    whole. Eval: no communication; the backward's sums over the batch stay Partial."""
    x, training, backward = call.inputs[0], _in_training(call), "backward" in str(call.target)
    if row.inputs[0] not in x.logical_dims(0) or (backward and not training):
        return row
    whole = Row(row.inputs, (row.outputs[0], *(R for _ in row.outputs[1:])))
    if not training:
        return whole
    drop = tuple(d for d in range(x.ndim) if d not in x.logical_dims(1))
    dtype = accumulate_dtype(x.dtype) if backward else MOMENTS
    return replace(whole, inner=(InnerCollective("all_reduce", "in0", "sum", drop, dtype, copies=2),))


def _per_channel(v: Any, like: TensorMeta) -> Any:
    """[C] to [1, C, 1, ...]."""
    return aten.view.default(v, [1, -1, *(1 for _ in like.shape[2:])])


def _batch_norm(ctx: LocalContext, x: Any, *args: Any) -> Any:
    """Any training forward. Shards are equally large, so with local mean m and biased variance v the whole
    batch has mean avg(m) and variance avg(v + m^2) - mean^2: one all-reduce, in float64 because the last
    difference cancels. Normalising with given statistics is then the op's eval form, one pass over the input."""
    axes = input_axes(ctx, 0, 0)
    if not axes or not _in_training(ctx.call):
        return ctx.call.target(x, *args)
    call, meta = ctx.call, ctx.call.inputs[0]
    given = {a.name: v for a, v in zip(call.target._schema.arguments, (x, *args), strict=False)}
    acc = accumulate_dtype(meta.dtype)
    x = cast(x, meta.dtype, acc)
    mean, var = _moments(ctx, x, acc, axes)
    invstd = aten.rsqrt.default(aten.add.Scalar(var, given["eps"]))
    weight, bias = (given[n] if given[n] is None else cast(given[n], call.tensor(n).dtype, acc) for n in ("weight", "bias"))
    out = _normalised(x, weight, bias, mean, var, given["eps"])
    return _as_outputs(call, [out, mean, invstd], _running(call, given, mean, var))


def _moments(ctx: LocalContext, x: Any, acc: torch.dtype, axes: Sequence[int]) -> tuple[Any, Any]:
    """Mean and biased variance of every channel over the whole batch."""
    here = [cast(v, acc, MOMENTS) for v in _pair(aten.batch_norm_update_stats.default(x, None, None, 0.0))]
    raw = aten.stack.default([here[0], aten.add.Tensor(here[1], aten.square.default(here[0]))])
    all_raw = aten.div.Scalar(ctx.all_reduce(raw, "sum", axes), ctx.ranks(axes))
    mean = aten.select.int(all_raw, 0, 0)
    var = aten.clamp_min.default(aten.sub.Tensor(aten.select.int(all_raw, 0, 1), aten.square.default(mean)), 0.0)
    return cast(mean, MOMENTS, acc), cast(var, MOMENTS, acc)


def _pair(outputs: Any) -> tuple[Any, Any]:
    """Both outputs of an op, whether tensors or FX proxies."""
    return outputs[0], outputs[1]


def _normalised(x: Any, weight: Any, bias: Any, mean: Any, var: Any, eps: float) -> Any:
    """(x - mean) / sqrt(var + eps) * weight + bias, fused."""
    return aten._native_batch_norm_legit_no_training.default(x, weight, bias, mean, var, 0.0, eps)[0]


def _running(call: Call, given: dict[str, Any], mean: Any, var: Any) -> list[Any]:
    """New running mean and variance (unbiased over the whole batch), for variants that return them."""
    if given.get("running_mean") is None:
        return []
    meta = call.inputs[0]
    count, acc = prod(meta.shape) // max(meta.shape[1], 1), accumulate_dtype(meta.dtype)
    out: list[Any] = []
    for name, new in (("running_mean", mean), ("running_var", aten.mul.Scalar(var, count / max(count - 1, 1)))):
        kept, at = call.tensor(name).dtype, len(call.outputs) - 2 + len(out)
        new = aten.lerp.Scalar(given[name], cast(new, acc, kept), given["momentum"])
        out.append(cast(new, kept, call.output(at).dtype))  # of a narrow one fake tensors, and so plans, have a wide one
    return out


def _as_outputs(call: Call, results: list[Any], running: list[Any]) -> tuple[Any, ...]:
    """In the schema's order and dtypes; a reserve, which only this op's own backward reads, is empty."""
    acc = accumulate_dtype(call.inputs[0].dtype)
    out = [cast(v, acc, call.output(i).dtype) for v, i in zip(results, range(len(call.outputs)), strict=False)]
    if len(call.outputs) > len(results) + len(running):
        out.append(aten.new_empty.default(results[0], [0], dtype=call.output(3).dtype))
    return (*out, *running)


def _batch_norm_backward(ctx: LocalContext, grad: Any, x: Any, weight: Any, running_mean: Any, running_var: Any,
                         mean: Any, invstd: Any, train: bool, eps: float, mask: Any, *reserve: Any) -> Any:
    """d x = w invstd (dy - avg(dy) - xhat avg(dy xhat)), averages over the whole batch. The op itself, asked for
    no d x, gives the sums of a rank in one pass; xhat times a number plus a number is a normalisation."""
    axes, names = input_axes(ctx, 0, 0), ("weight", "running_mean", "running_var")
    kept = ctx.call.tensor("save_mean").dtype if train else torch.float32
    if any(m is not None and m.dtype != ctx.call.inputs[0].dtype for m in (ctx.call.given(n) for n in names)):
        # torch's kernels keep and want statistics in float32 then, though fake tensors, and so the split forward, have them narrow
        mean, invstd = (v if v is None else aten._to_copy.default(v, dtype=torch.float32) for v in (mean, invstd))
        kept = torch.float32
    if not axes or not train:
        return ctx.call.target(grad, x, weight, running_mean, running_var, mean, invstd, train, eps, mask, *reserve)
    call, meta = ctx.call, ctx.call.inputs[1]
    acc, count = accumulate_dtype(meta.dtype), prod(meta.shape) // max(meta.shape[1], 1)
    grad, x = cast(grad, call.inputs[0].dtype, acc), cast(x, meta.dtype, acc)
    mean, invstd = cast(mean, kept, acc), cast(invstd, kept, acc)
    # Neither sum depends on the weight, but without one the kernel of a GPU makes none.
    here = aten.native_batch_norm_backward.default(grad, x, invstd, None, None, mean, invstd, True, eps, [False, True, True])
    sums = ctx.all_reduce(aten.stack.default([here[1], here[2]]), "sum", axes)
    along, total = aten.select.int(sums, 0, 0), aten.select.int(sums, 0, 1)
    scale = invstd if weight is None else aten.mul.Tensor(invstd, weight)
    back = aten.div.Scalar(scale, -count)
    var = aten.reciprocal.default(aten.square.default(invstd))
    pulled = _normalised(x, aten.mul.Tensor(along, back), aten.mul.Tensor(total, back), mean, var, 0.0)
    results = (aten.addcmul.default(pulled, grad, _per_channel(scale, meta)), along, total)
    return tuple(None if m is None else cast(v, acc, m.dtype) for v, m in zip(results, call.outputs, strict=True))


def _split(call: Call, inputs: Sequence[Any]) -> Any:
    """Per strategy, whether ranks share the batch whose statistics are taken."""
    whole = call.inputs[0].logical_shape
    return np.logical_or.reduce([np.asarray(inputs[0][d]) < whole[d] for d in call.inputs[0].logical_dims(0)]) & _in_training(call)


def _batch_norm_kernels(call: Call, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """Those of `_moments`, the scale, and of each running statistic."""
    return _split(call, inputs) * (13 + (3 if call.given("running_mean") is not None else 0))


def _batch_norm_backward_kernels(call: Call, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    return _split(call, inputs) * 7


def _batch_norm_backward_moved(call: Call, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """The sums write nothing; then the input is normalised, and the result and the gradient are read."""
    return _split(call, inputs) * prod(inputs[1]) * 4 * accumulate_dtype(call.inputs[1].dtype).itemsize


# Weight norm --------------------------------------------------------------------------------------------

def _weight_norm_terms(call: Call, weight: str) -> tuple[str, str]:
    """Letters of (weight, its norms): one norm per entry of `dim`, over all other dims."""
    n = len(call.tensor(weight).shape)
    at = call.argument("dim") % n
    return " ".join("x" if d == at else f"y{d}!" for d in range(n)), " ".join("x" if d == at else "1" for d in range(n))


def _weight_norm_line(call: Call) -> str:
    v, g = _weight_norm_terms(call, "v")
    return f"{v}, {g} -> {v}, {g}"


def _weight_norm_backward_line(call: Call) -> str:
    v, g = _weight_norm_terms(call, "saved_v")
    return f"{v}, ~{v}, ~{g}, ~{g} -> {v}, {g}"


def _batch(local: Any, **beside: Any) -> Rule:
    return replace(adjust(rule(_batch_norm_line, family=Family.NORM, local=local), _batch_norm_row), **beside)


BATCH_NORM = _batch(_batch_norm, kernels=_batch_norm_kernels)
BATCH_NORM_BACKWARD = _batch(_batch_norm_backward, kernels=_batch_norm_backward_kernels, moved=_batch_norm_backward_moved)


RULES = {
    aten._weight_norm_interface.default: rule(_weight_norm_line, family=Family.NORM, local=contiguous_inputs),
    aten._weight_norm_interface_backward.default: rule(_weight_norm_backward_line, family=Family.NORM, partial="each",
                                                       local=contiguous_inputs),
    aten.native_layer_norm.default: rule(_layer_norm_line, family=Family.NORM),
    aten.native_layer_norm_backward.default: rule(_layer_norm_backward_line, family=Family.NORM, local=_layer_norm_backward),
    aten.native_group_norm.default: rule(_group_norm_line, family=Family.NORM, local=_group_norm),
    aten.native_group_norm_backward.default: rule(_group_norm_backward_line, family=Family.NORM,
                                                  local=_group_norm_backward),
    aten._native_batch_norm_legit_functional.default: BATCH_NORM,
    aten._native_batch_norm_legit.no_stats: BATCH_NORM,
    aten._native_batch_norm_legit_no_training.default: BATCH_NORM,
    aten._batch_norm_with_update_functional.default: BATCH_NORM,
    aten._batch_norm_no_update.default: BATCH_NORM,
    aten.native_batch_norm_backward.default: BATCH_NORM_BACKWARD,
    aten.batch_norm_backward.default: BATCH_NORM_BACKWARD,
}
