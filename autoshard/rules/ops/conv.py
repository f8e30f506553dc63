"""Convolutions over batch, output and input channels; pooling and resizing over everything but the image.

Splitting the image itself would need an exchange of borders and is not offered."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from autoshard.base.graph import Call
from autoshard.base.spec import R
from autoshard.rules.family import Family
from autoshard.rules.notation import rule
from autoshard.rules.parts import adjust, contiguous_inputs, letters, on_first, output_axes, partial_axes
from autoshard.rules.types import LocalContext, Row, Rule

aten = torch.ops.aten


def _terms(call: Call) -> tuple[str, str, str, str]:
    """Letters of (input, weight, bias, output). Grouped convolutions split channels only when every input
    channel is a group of its own: no tensor shows the number of groups, so nothing else could check it."""
    n = len(call.tensor("input").shape) - 2
    groups = call.argument("groups")
    image, kernel, result = letters("p", n, "!"), letters("k", n, "!"), letters("u", n, "!")
    if groups == 1:
        channels = "i o" if call.argument("transposed") else "o i"
        return f"n i {image}", f"{channels} {kernel}", "o", f"n o {result}"
    c = "c" if groups == call.tensor("input").shape[1] else "c!"
    return f"n {c} {image}", f"{c} j! {kernel}", c, f"n {c} {result}"


def _forward_line(call: Call) -> str:
    x, w, b, y = _terms(call)
    return f"{x}, {w}, {b} -> {y}"


def _backward_line(call: Call) -> str:
    x, w, b, y = _terms(call)
    return f"{y}, {x}, {w} -> {x}, {w}, {b}"


def _backward_row(call: Call, row: Row) -> Row:
    """Splitting the input channels leaves the gradient of the output, and so the bias's, whole."""
    bias = row.outputs[2] if row.inputs[0] != R else R
    return Row(row.inputs, (*row.outputs[:2], bias))


def _local_groups(ctx: LocalContext, channel_axes: Sequence[int], groups: int) -> int:
    return groups if groups == 1 else groups // ctx.ranks(channel_axes)


def _convolution(ctx: LocalContext, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any,
                 transposed: bool, output_padding: Any, groups: int) -> Any:
    if bias is not None:
        bias = on_first(ctx, bias, partial_axes(ctx, ctx.outputs[0]))
    groups = _local_groups(ctx, output_axes(ctx, 0, 1), groups)
    return aten.convolution.default(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)


def _convolution_backward(ctx: LocalContext, grad: Any, x: Any, weight: Any, bias_sizes: Any, stride: Any,
                          padding: Any, dilation: Any, transposed: bool, output_padding: Any, groups: int,
                          output_mask: Any) -> Any:
    sizes = None if bias_sizes is None else [ctx.local_in(0)[1]]
    axes = [a for d in ctx.call.inputs[0].logical_dims(1) for a in ctx.axes(ctx.inputs[0], d)]
    return aten.convolution_backward.default(grad, x, weight, sizes, stride, padding, dilation, transposed,
                                             output_padding, _local_groups(ctx, axes, groups), output_mask)


def forward_flops(call: Call, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """2 x positions x weights per position: every element of the output (of the input when transposed)
    meets each weight of its channel once, one multiply and one add."""
    pixels = inputs[0] if call.argument("transposed") else outputs[0]
    return _flops(call, pixels, inputs[1])


def backward_flops(call: Call, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """One forward's worth for each of the gradients of input and weight that is asked for."""
    pixels = inputs[1] if call.argument("transposed") else inputs[0]
    return sum(call.argument("output_mask")[:2]) * _flops(call, pixels, inputs[2])


def _flops(call: Call, pixels: Sequence[Any], weight: Sequence[Any]) -> Any:
    """`pixels` times the weights of one channel: the weight's dim 0 counts channels of `pixels`."""
    meta = call.inputs[call.argument("weight").index]
    return 2.0 * prod(pixels) * prod(weight[i] for i in range(len(meta.logical_dims(0)), meta.ndim))


def _image_line(image_dims: int, tensors: int, outputs: int) -> Any:
    """All dims but the last `image_dims` are shared by all tensors. Of several the first is a gradient, in which ops are linear."""
    def line(call: Call) -> str:
        lead = letters("x", len(call.inputs[0].shape) - image_dims)
        term = f"{lead} {letters('p', image_dims, '!')}"
        return f"{', ~'.join([term] * tensors)} -> {', '.join([term] * outputs)}"
    return line


def _image(image_dims: int, tensors: int = 1, outputs: int = 1, sizes: tuple[tuple[str, str], ...] = ()) -> Rule:
    """A maximum has two outputs, and is not linear; all else is."""
    return rule(_image_line(image_dims, tensors, outputs), family=Family.REDUCTION, sizes=sizes,
                partial="each" if outputs == 1 else "none")


def _pads() -> dict[Any, Rule]:
    """Borders that repeat or mirror the image."""
    names = [(f"{kind}_pad{n}d", n) for kind in ("reflection", "replication") for n in (1, 2, 3)]
    forward = {getattr(aten, name).default: _image(n) for name, n in names}
    return {**forward, **{getattr(aten, f"{name}_backward").default: _image(n, tensors=2) for name, n in names}}


RESIZED = (("input_size", "out0"),)

RULES = {
    aten.convolution.default: rule(_forward_line, family=Family.CONV, local=_convolution, flops=forward_flops),
    aten.convolution_backward.default: adjust(rule(_backward_line, family=Family.CONV, local=_convolution_backward,
                                                   flops=backward_flops), _backward_row),
    aten.max_pool2d_with_indices.default: _image(2, outputs=2),
    aten.max_pool2d_with_indices_backward.default: _image(2, tensors=3),
    aten.max_pool3d_with_indices.default: _image(3, outputs=2),
    aten.max_pool3d_with_indices_backward.default: _image(3, tensors=3),
    aten.avg_pool2d.default: _image(2),
    aten.avg_pool2d_backward.default: _image(2, tensors=2),
    aten.avg_pool3d.default: _image(3),
    aten.avg_pool3d_backward.default: _image(3, tensors=2),
    aten._adaptive_avg_pool2d.default: _image(2),
    aten._adaptive_avg_pool2d_backward.default: _image(2, tensors=2),
    aten._adaptive_avg_pool3d.default: _image(3),
    aten._adaptive_avg_pool3d_backward.default: _image(3, tensors=2),
    aten.adaptive_max_pool2d.default: _image(2, outputs=2),
    aten.adaptive_max_pool2d_backward.default: _image(2, tensors=3),
    aten.adaptive_max_pool3d.default: _image(3, outputs=2),
    aten.adaptive_max_pool3d_backward.default: replace(_image(3, tensors=3), local=contiguous_inputs),
    **_pads(),
    aten.upsample_nearest1d.default: _image(1),
    aten.upsample_nearest1d_backward.default: _image(1, sizes=RESIZED),
    aten.upsample_nearest2d.default: _image(2),
    aten.upsample_nearest2d.vec: _image(2),
    aten.upsample_nearest2d_backward.default: _image(2, sizes=RESIZED),
    aten.upsample_bilinear2d.default: _image(2),
    aten.upsample_bilinear2d.vec: _image(2),
    aten.upsample_bilinear2d_backward.default: _image(2, sizes=RESIZED),
    aten.upsample_bicubic2d.default: _image(2),
    aten.upsample_bicubic2d.vec: _image(2),
    aten.upsample_bicubic2d_backward.default: _image(2, sizes=RESIZED),
}
