"""Ops that move or sample pixels: shuffles between channels and space, windows, borders, grids, memory read by strides.

A letter may stand for dims of different sizes (`c` for C r^2 channels and for C): both split into equal, contiguous blocks that
belong together, and only where both divide."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from autoshard.base.graph import Call
from autoshard.rules.family import Family
from autoshard.rules.notation import rule
from autoshard.rules.parts import letters
from autoshard.rules.types import LocalContext, Rule

aten = torch.ops.aten


def _moves(line: str | Callable[[Call], str], **options: Any) -> Rule:
    """A rule whose op is linear in its first tensor (a `~` marks the others)."""
    return rule(line, partial="each", family=Family.COPY, **options)


def _samples(line: str | Callable[[Call], str], **options: Any) -> Rule:
    return rule(line, partial="each", family=Family.GATHER, **options)


# Shuffles and windows -----------------------------------------------------------------------------------

def _resized(letter: str, old: int, new: int) -> str:
    """The letter of a dim that changes its size. From or to size 1 is no broadcast: it stays whole."""
    return f"{letter}!" if 1 in (old, new) else letter


def _pixel_line(call: Call) -> str:
    """Channels, height and width: C r^2, H, W to C, H r, W r, or back."""
    sizes = zip("chw", call.inputs[0].shape[-3:], call.output().shape[-3:], strict=True)
    dims = " ".join(_resized(*s) for s in sizes)
    return f"... {dims} -> ... {dims}"


def _columns_line(call: Call) -> str:
    """Channels are the major part of the columns; a batch is optional."""
    (x,), y = call.inputs, call.output()
    image, columns = "h! w!", "l!"
    old, new = (image, columns) if "im2col" in str(call.target) else (columns, image)
    channels = len(x.shape) - len(old.split()) - 1
    c = _resized("c", x.shape[channels], y.shape[channels])
    lead = letters("n", channels)
    return f"{lead} {c} {old} -> {lead} {c} {new}"


def _channel_shuffle_line(call: Call) -> str:
    image = letters("p", len(call.inputs[0].shape) - 2)
    return f"n c! {image} -> n c! {image}"


# Sampling at the points of a grid -----------------------------------------------------------------------

def _grid_rules(image_dims: int) -> dict[Any, Rule]:
    """Every point reads the whole image: points split beside a whole image, whose gradient then is a sum over them."""
    image, points = letters("i", image_dims, "!"), letters("p", image_dims)
    x, grid, y = f"n c {image}", f"n {points} xy!", f"n c {points}"
    forward, backward = (getattr(aten, f"grid_sampler_{image_dims}d{end}").default for end in ("", "_backward"))
    return {forward: _samples(f"{x}, ~{grid} -> {y}"), backward: _samples(f"{y}, ~{x}, ~{grid} -> {x}, {grid}")}


def _affine_grid_line(call: Call) -> str:
    image = letters("p", len(call.argument("size")) - 2, "!")
    return f"n xy! a! -> n {image} xy!"


def _affine_grid(ctx: LocalContext, theta: Any, size: Sequence[int], align_corners: bool) -> Any:
    return aten.affine_grid_generator.default(theta, [ctx.local_out(0)[0], *size[1:]], align_corners)


# Memory by strides --------------------------------------------------------------------------------------

def dense(shape: Sequence[int]) -> list[int]:
    """Strides of a contiguous tensor."""
    return [prod(shape[d + 1:]) for d in range(len(shape))]


def _kept(call: Call, shape: Sequence[int]) -> int:
    """How many leading dims of a contiguous tensor of `shape` are leading dims of the strided view, with all that one entry of
    them reads inside that entry. The trace makes the tensor contiguous before."""
    size, stride = call.argument("size"), call.argument("stride")
    for n in range(min(len(size), len(shape)), 0, -1):
        same = tuple(size[:n]) == tuple(shape[:n]) and list(stride[:n]) == dense(shape)[:n]
        if same and _last(call, n) < prod(shape[n:]):
            return n
    return 0


def _last(call: Call, n: int) -> int:
    """The last element that the first entry of the leading `n` dims of the view reads."""
    size, stride = call.argument("size")[n:], call.argument("stride")[n:]
    first: int = call.argument("storage_offset") or 0
    steps: int = sum((m - 1) * s for m, s in zip(size, stride, strict=True))
    return first + steps


def _strided_terms(call: Call) -> tuple[str, str]:
    """Letters of the tensor and of the strided view. Where no dim is the same, one that steps through all of the memory still
    splits with the tensor's first: autograd writes into flat memory."""
    shape, size, stride = call.inputs[0].shape, call.argument("size"), call.argument("stride")
    if 0 in (*shape, *size) or not shape or not size:
        return letters("x", len(shape), "!"), letters("y", len(size), "!")
    n = _kept(call, shape)
    lead = letters("d", n)
    if not n and size[0] * stride[0] == prod(shape) and _last(call, 1) < stride[0]:
        n, lead = 1, _resized("d", shape[0], size[0])
    return f"{lead} {letters('x', len(shape) - n, '!')}", f"{lead} {letters('y', len(size) - n, '!')}"


def _strided_line(call: Call) -> str:
    return " -> ".join(_strided_terms(call))


def _strided_scatter_line(call: Call) -> str:
    x, view = _strided_terms(call)
    return f"{x} + {view} -> {x}"


def _strided(ctx: LocalContext, x: Any, *args: Any, **kwargs: Any) -> Any:
    """The same on the local piece. The copy makes it contiguous, and begins its memory where it begins."""
    call, src = ctx.call, args[:len(ctx.call.inputs) - 1]
    n = _kept(call, call.inputs[0].shape)
    size = ctx.local_in(1) if src else ctx.local_out(0)
    stride = [*dense(ctx.local_in(0))[:n], *call.argument("stride")[n:]]
    x = aten.clone.default(x, memory_format=torch.contiguous_format)
    return call.target(x, *src, list(size), stride, call.argument("storage_offset") or 0)


RULES = {
    aten.pixel_shuffle.default: _moves(_pixel_line),
    aten.pixel_unshuffle.default: _moves(_pixel_line),
    aten.channel_shuffle.default: _moves(_channel_shuffle_line),
    aten.im2col.default: _moves(_columns_line),
    aten.col2im.default: _moves(_columns_line),
    **_grid_rules(2),
    **_grid_rules(3),
    aten.affine_grid_generator.default: _samples(_affine_grid_line, local=_affine_grid),
    aten.as_strided.default: _moves(_strided_line, local=_strided),
    aten.as_strided_copy.default: _moves(_strided_line, local=_strided),
    aten.as_strided_scatter.default: _moves(_strided_scatter_line, local=_strided),
}
