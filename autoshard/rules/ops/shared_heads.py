"""Attention whose heads of keys and values serve several heads of the query, split further than there are heads of keys.

Eight heads of keys on sixteen ranks, or on eight ranks of which keys are whole for another reason: a rank holds some heads of the query, all
(or more) heads of keys, and picks those that its own share. Gradients of keys and values are Partial: zeros but for the heads picked. Forty heads
that share ten, on four ranks: a rank's ten heads share two whole ones and half of another, so it picks one head of keys for each of its own.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from autoshard.base.graph import Call
from autoshard.base.spec import PSUM, R, Spec
from autoshard.rules.parts import input_axes
from autoshard.rules.types import LocalContext, Row, Rule

aten = torch.ops.aten
HEADS = 1
KEYS = ("key", "value")


def over_shared_heads(base: Rule) -> Rule:
    """`base`, of an attention of the CPU or its backward, with rows that split the query's heads alone."""
    def local(ctx: LocalContext, *args: Any, **kwargs: Any) -> Any:
        whole_run = base.local or ctx.call.target
        run = whole_run if base.local is None else lambda *a, **k: whole_run(ctx, *a, **k)
        extra = _extra_axes(ctx)
        return _picked(ctx, extra, run, args, kwargs) if extra else run(*args, **kwargs)

    return replace(base, rows=lambda call: (*base.rows(call), *_rows(call)), local=local, takes=takes)


def group(call: Call) -> int:
    """Heads of the query for each one of keys."""
    query, key = (call.tensor(name).shape[HEADS] for name in ("query", "key"))
    return query // key if key else 1


def _rows(call: Call) -> tuple[Row, ...]:
    queries = [i for i, m in enumerate(call.inputs) if i not in _slots(call)]
    metas = [call.inputs[i] for i in queries]
    if group(call) == 1 or call.argument("dropout_p") or any(len(m.logical_dims(HEADS)) != 1 for m in (*metas, *filter(None, call.outputs))):
        return ()
    inputs = [R] * len(call.inputs)
    for i in queries:  # a mask may have one row for all heads
        meta = call.inputs[i]
        inputs[i] = meta.logical_dims(HEADS).start if len(meta.shape) > 2 and meta.shape[HEADS] != 1 else R
    mask = call.given("attn_mask")
    if mask is not None and len(mask.shape) != 4:
        return ()
    split = tuple(R if m is None else m.logical_dims(HEADS).start for m in call.outputs)
    return (Row(tuple(inputs), (split[0], PSUM, PSUM, *split[3:]) if call.given("grad_out") is not None else split),)


def _slots(call: Call) -> tuple[int, ...]:
    return tuple(call.argument(name).index for name in KEYS)


def takes(call: Call, inputs: Sequence[Spec], sizes: tuple[int, ...]) -> bool:
    """Whether the heads of keys that a rank holds are those that its heads of the query share: the axes that split the query alone come after
    those that split both."""
    query, key = call.argument("query").index, call.argument("key").index
    dims = [call.inputs[i].logical_dims(HEADS) for i in (query, key)]
    mine, theirs = ([a for a, p in enumerate(inputs[i]) if p in d and sizes[a] > 1] for i, d in zip((query, key), dims, strict=True))
    return mine[:len(theirs)] == theirs


def _extra_axes(ctx: LocalContext) -> tuple[int, ...]:
    query, key = (input_axes(ctx, ctx.call.argument(name).index, HEADS) for name in ("query", "key"))
    return tuple(a for a in query if a not in key)


def _picked(ctx: LocalContext, extra: Sequence[int], run: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`run` on the heads of keys that this rank's heads share."""
    heads, there = (ctx.local_in(ctx.call.argument(name).index)[HEADS] for name in ("query", "key"))
    pick, put = _one_for_each(ctx, extra, heads) if heads % group(ctx.call) and group(ctx.call) % heads else _range(ctx, extra, heads, there)
    names = [a.name for a in ctx.call.target._schema.arguments]
    found = run(*(pick(x) if name in KEYS else x for name, x in zip(names, args, strict=False)), **kwargs)
    return found if ctx.call.given("grad_out") is None else (found[0], *(put(grad) for grad in (found[1], found[2])))


Pick = Callable[[Any], Any]


def _range(ctx: LocalContext, extra: Sequence[int], heads: int, there: int) -> tuple[Pick, Pick]:
    """Pick heads of keys that are shared by heads of this rank alone, or one that all share; put their gradients among zeros."""
    each = group(ctx.call)
    first, count = ctx.index(extra) * heads // each, max(heads // each, 1)
    rest = [0, 0, 0, 0, first, first * -1 + (there - count)]
    return lambda x: aten.slice.Tensor(x, HEADS, first, first + count), lambda grad: aten.constant_pad_nd.default(grad, rest)


def _one_for_each(ctx: LocalContext, extra: Sequence[int], heads: int) -> tuple[Pick, Pick]:
    """Pick one head of keys for each head of the query; add their gradients up where they share one."""
    mine = aten.add.Tensor(aten.arange.default(heads, dtype=torch.int64), ctx.index(extra), alpha=heads)
    at = aten.div.Tensor_mode(mine, group(ctx.call), rounding_mode="floor")
    shape = ctx.local_in(ctx.call.argument("key").index)

    def put(grad: Any) -> Any:
        return aten.index_add.default(aten.new_zeros.default(grad, shape), HEADS, at, grad)

    return lambda x: aten.index_select.default(x, HEADS, at), put
