"""Ops that make tensors from nothing: any shard of the output is made in place."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from autoshard.base.graph import Call
from autoshard.base.spec import PSUM, R
from autoshard.rules.family import Family
from autoshard.rules.notation import rule
from autoshard.rules.parts import cast
from autoshard.rules.types import LocalContext, Row, Rule

aten = torch.ops.aten


def _filled(name: str = "size") -> Rule:
    return rule("-> ...", family=Family.POINTWISE, sizes=((name, "out0"),))


def _like_rows(call: Call) -> tuple[Row, ...]:
    """The input gives its shape only, so a Partial one will do."""
    same = tuple(Row((d,), (d,)) for d in range(min(call.inputs[0].ndim, call.output().ndim)))
    return (Row((R,), (R,)), *same, Row((PSUM,), (R,)))


def _new_rows(call: Call) -> tuple[Row, ...]:
    """The input gives its dtype and device only: any placement in, any shard out."""
    given = (R, *range(call.inputs[0].ndim), PSUM)
    made = (R, *range(call.output().ndim))
    return tuple(Row((p,), (q,)) for q in made for p in given)


def _like_factors(call: Call) -> tuple[tuple[tuple[int, ...], ...]]:
    return (call.inputs[0].factors,)


def _arange(ctx: LocalContext, *args: Any, **kwargs: Any) -> Any:
    """start + step * (global position): the rank's piece begins at its index times the local length."""
    axes = ctx.axes(ctx.outputs[0], 0)
    if not axes:
        return ctx.call.target(*args, **kwargs)
    start, step = ctx.call.argument("start", 0), ctx.call.argument("step", 1)
    n, dtype = ctx.local_out(0)[0], ctx.call.output().dtype
    positions = aten.add.Tensor(aten.arange.default(n, **{**kwargs, "dtype": torch.int64}), ctx.index(axes), alpha=n)
    if not dtype.is_floating_point:  # torch truncates both numbers first
        positions = aten.add.Scalar(aten.mul.Scalar(positions, int(step)), int(start))
        return cast(positions, torch.int64, dtype)
    acc = torch.float32 if dtype in (torch.float16, torch.bfloat16) else torch.float64  # as torch's own kernel
    return cast(aten.add.Scalar(aten.mul.Scalar(cast(positions, torch.int64, acc), step), start), acc, dtype)


def _new_dense(ctx: LocalContext, x: Any, size: Any, stride: Any, **kwargs: Any) -> Any:
    """Strides of the whole mean nothing for a piece."""
    return aten.new_empty.default(x, list(ctx.local_out(0)), **kwargs)


_range = rule("-> n", local=_arange)
_like = Rule(rows=_like_rows, factors=_like_factors, notation="shape of the input")
_new = Rule(rows=_new_rows, sizes=(("size", "out0"),), notation="dtype of the input")

RULES = {
    aten.arange.default: _range,
    aten.arange.start: _range,
    aten.arange.start_step: _range,
    aten.zeros.default: _filled(),
    aten.ones.default: _filled(),
    aten.full.default: _filled(),
    aten.empty.memory_format: _filled(),
    aten.scalar_tensor.default: rule("->"),
    aten.eye.default: rule("-> n! m!"),
    aten.eye.m: rule("-> n! m!"),
    aten.tril_indices.default: rule("-> pair! n!"),
    aten.triu_indices.default: rule("-> pair! n!"),
    aten.linspace.default: rule("-> n!"),
    **dict.fromkeys((aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default), _like),
    **dict.fromkeys((aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default), _new),
    aten.new_empty_strided.default: replace(_new, local=_new_dense),
    aten.zero.default: _like,
    aten.fill.Scalar: Rule(rows=_like_rows, factors=_like_factors, notation="shape of the input"),
    aten.fill.Tensor: rule("~..., -> ...", partial="each"),
}
