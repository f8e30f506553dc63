"""Attention whose heads of keys and values serve several heads of the query, split further than there are heads of keys.

Eight heads of keys on sixteen ranks, or on eight ranks of which keys are whole for another reason: a rank holds some heads of the query, all
(or more) heads of keys, and picks those that its own share. Ten of forty heads begin and end within what four share: there, keys are repeated for
each. Gradients of keys and values are Partial: zeros but for the heads picked.
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
Ways = tuple[Callable[[Any, Sequence[int]], Any], Callable[[Any, Sequence[int]], Any]]
"""From keys or values of a shape that a rank holds to those of its heads, and back from their gradients."""


def over_shared_heads(base: Rule) -> Rule:
    """`base`, of an attention of the CPU or its backward, with rows that split the query's heads alone."""
    def local(ctx: LocalContext, *args: Any, **kwargs: Any) -> Any:
        whole_run = base.local or ctx.call.target
        run = whole_run if base.local is None else lambda *a, **k: whole_run(ctx, *a, **k)
        extra = _extra_axes(ctx)
        return _with_own_keys(ctx, extra, run, args, kwargs) if extra else run(*args, **kwargs)

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


def _with_own_keys(ctx: LocalContext, extra: Sequence[int], run: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`run` on the keys and values of this rank's heads, and gradients of all that it holds."""
    heads, there = (ctx.local_in(ctx.call.argument(name).index)[HEADS] for name in ("query", "key"))
    each = group(ctx.call)
    at = ctx.index(extra) * heads
    if heads % each == 0 or each % heads == 0:  # heads of a rank share whole heads of keys, or are all of one
        own, back = _picked(at // each, max(heads // each, 1), there)
    else:
        own, back = _repeated(at, heads, there, each)
    names = [a.name for a in ctx.call.target._schema.arguments]
    found = run(*(own(x, ctx.local_in(ctx.call.argument(name).index)) if name in KEYS else x for name, x in zip(names, args, strict=False)), **kwargs)
    if ctx.call.given("grad_out") is None:
        return found
    shapes = (ctx.local_in(ctx.call.argument(name).index) for name in KEYS)
    return found[0], *(back(grad, shape) for grad, shape in zip(found[1:3], shapes, strict=True))


def _picked(first: Any, count: int, there: int) -> Ways:
    """`count` heads from `first` on, and zeros around their gradients."""
    rest = [0, 0, 0, 0, first, first * -1 + (there - count)]
    return (lambda x, shape: aten.slice.Tensor(x, HEADS, first, first + count)), lambda grad, shape: aten.constant_pad_nd.default(grad, rest)


def _repeated(at: Any, heads: int, there: int, each: int) -> Ways:
    """Heads of keys once for each of `heads` of the query from `at` on, where these begin or end within what shares one: ten of forty heads, of
    which four share one. Gradients are summed over those."""
    rest = [0, 0, 0, 0, at, at * -1 + (there * each - heads)]

    def own(x: Any, shape: Sequence[int]) -> Any:
        b, _, *tail = shape
        wide = aten.expand.default(aten.unsqueeze.default(x, HEADS + 1), [b, there, each, *tail])
        return aten.slice.Tensor(aten.reshape.default(wide, [b, there * each, *tail]), HEADS, at, at + heads)

    def back(grad: Any, shape: Sequence[int]) -> Any:
        b, _, *tail = shape
        wide = aten.reshape.default(aten.constant_pad_nd.default(grad, rest), [b, there, each, *tail])
        return aten.sum.dim_IntList(wide, [HEADS + 1])

    return own, back
