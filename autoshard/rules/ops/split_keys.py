"""Attention over keys and values that are split along the sequence, as a long cache may be.

Every rank attends to its part and gets an output and the log-sum-exp of its scores, lse. With m the largest lse of all parts,

    w = exp(lse - m)        out = sum(w out) / sum(w)        lse = m + log(sum(w))

One all-reduce makes m, one the two sums. A row whose keys are all masked here has weight 0; one without any key at all gets zeros, as
from torch's kernel. Source: Dao et al., "Flash-Decoding for long-context inference", PyTorch blog, 2023; the merge is that
of Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from autoshard.base.graph import Call, Slot
from autoshard.base.spec import R
from autoshard.rules.parts import accumulate_dtype, cast, input_axes
from autoshard.rules.types import InnerCollective, LocalContext, Row, Rule

aten = torch.ops.aten
KEYS = 2
"""The sequence dim of keys and values; it is the last one of a mask."""


def over_split_keys(base: Rule) -> Rule:
    """`base`, of an attention that gives (output, log-sum-exp), with rows that split the keys."""
    return replace(base, rows=lambda call: (*base.rows(call), *_rows(call)), local=_attend)


def _rows(call: Call) -> tuple[Row, ...]:
    query, key, value, mask = (call.argument(name) for name in ("query", "key", "value", "attn_mask"))
    if call.inputs[query.index].shape[KEYS] >= call.inputs[key.index].shape[KEYS] or call.argument("is_causal") or call.argument("dropout_p"):
        return ()
    split = {key.index: KEYS, value.index: KEYS}
    if isinstance(mask, Slot) and call.inputs[mask.index].shape[-1] != 1:
        split[mask.index] = len(call.inputs[mask.index].shape) - 1
    dims = {i: call.inputs[i].logical_dims(d) for i, d in split.items()}
    if any(len(d) > 1 for d in dims.values()):
        return ()
    placed = dict.fromkeys(range(len(call.inputs)), R) | {i: d.start for i, d in dims.items()}
    out = call.output()
    sums = accumulate_dtype(out.dtype)
    inner = (InnerCollective("all_reduce", "out1", "max"), InnerCollective("all_reduce", "out1", dtype=sums, copies=out.shape[-1] + 1))
    return (Row(tuple(placed.values()), (R,) * len(call.outputs), inner),)


def _attend(ctx: LocalContext, query: Any, key: Any, value: Any, *rest: Any, attn_mask: Any = None, **named: Any) -> Any:
    found = ctx.call.target(query, key, value, *rest, attn_mask=attn_mask, **named)
    axes = input_axes(ctx, ctx.call.argument("key").index, KEYS)
    return _merged(ctx, found[0], found[1], attn_mask, axes) if axes else found


def _merged(ctx: LocalContext, out: Any, lse: Any, mask: Any, axes: tuple[int, ...]) -> tuple[Any, Any]:
    """Output and log-sum-exp of all parts."""
    lse = _without_masked(ctx, lse, mask)
    top = ctx.all_reduce(lse, "max", axes)
    top = aten.masked_fill.Scalar(top, aten.eq.Scalar(top, -torch.inf), 0.0)  # no key anywhere: weights of 0, not of nan
    have, sums, size = ctx.call.output().dtype, accumulate_dtype(ctx.call.output().dtype), ctx.call.output().shape[-1]
    weight = aten.unsqueeze.default(cast(aten.exp.default(aten.sub.Tensor(lse, top)), ctx.call.output(1).dtype, sums), -1)
    weighted = aten.mul.Tensor(cast(out, have, sums), weight)
    both = ctx.all_reduce(aten.cat.default([weighted, weight], -1), "sum", axes)
    total = aten.slice.Tensor(both, -1, size, size + 1)
    total = aten.masked_fill.Scalar(total, aten.eq.Scalar(total, 0.0), 1.0)  # zeros over 1
    merged = aten.div.Tensor(aten.slice.Tensor(both, -1, 0, size), total)
    logs = cast(aten.log.default(aten.squeeze.dim(total, -1)), sums, ctx.call.output(1).dtype)
    return cast(merged, sums, have), aten.add.Tensor(top, logs)


def _without_masked(ctx: LocalContext, lse: Any, mask: Any) -> Any:
    """-inf for rows that see no key here, of which kernels say 0 or -inf."""
    given = ctx.call.given("attn_mask")
    if given is None:
        return lse
    sees = aten.any.dim(mask, -1) if given.dtype == torch.bool else aten.ne.Scalar(aten.amax.default(mask, [-1]), -torch.inf)
    return aten.masked_fill.Scalar(lse, aten.logical_not.default(sees), -torch.inf)
