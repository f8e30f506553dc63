"""Causal attention whose queries are split along the sequence, as context parallelism has them: keys and values are whole.

A rank runs rows where they stand in the sequence (causal_rows.py). Gathering the keys is a redistribution like any other, and the gradients
of keys and values are Partial.

Early rows see few keys and late ones many, so that the last rank would have nearly twice the average to do. Therefore rank r of n keeps the first
half of its rows and swaps the second one with rank n - 1 - r, and results are swapped back: all have as much to do, and the layout of everything
else stays a plain shard. Halves r and 2n - 1 - r on a rank are the balanced ("zigzag") order of context parallelism, made inside the op. What
travels is half a shard of queries and results.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from autoshard.base.graph import Call
from autoshard.rules.ops import causal_rows
from autoshard.rules.parts import adjust, input_axes
from autoshard.rules.types import InnerCollective, LocalContext, Row, Rule

aten = torch.ops.aten

QUERIES = 2
"""The sequence dim of queries, and of all that has a row per query."""
ARGUMENTS = ("grad_out", "query", "key", "value", "out", "logsumexp")
SENT = ("grad_out", "query", "out", "logsumexp")
"""What the ops of causal_rows.py take, and what of it has a row per query."""


def may_split(call: Call) -> bool:
    """Whether the rows of a causal attention can be run apart: as many queries as keys, in one run of memory, without a mask besides."""
    query, key = (call.tensor(name) for name in ("query", "key"))
    return query.shape[QUERIES] == key.shape[QUERIES] and call.given("attn_mask") is None and len(query.logical_dims(QUERIES)) == 1


def mean_keys(call: Call, queries: Any, keys: Any) -> Any:
    """How many keys a query of a causal attention sees on average, on the rank that has most to do. `queries`, `keys`: local lengths, ints or arrays.
    Whole, or in even shards, they see half the keys. Of n rows, an odd number, the last rank has (n + 1) / 2 of the last n."""
    split = np.not_equal(queries, call.tensor("query").shape[QUERIES])
    late = (queries + 1) // 2 / np.maximum(queries, 1)
    return np.where(split, late * (keys - queries) + queries / 2, 0.5 * keys)


def with_swaps(call: Call, row: Row) -> Row:
    """`row` with the collectives of `_own_rows`, if it splits the queries of a causal attention."""
    slot = call.argument("query").index
    if not call.argument("is_causal") or row.inputs[slot] not in call.inputs[slot].logical_dims(QUERIES):
        return row
    names = [("in", call.argument(name).index) for name in SENT if call.given(name) is not None] + [("out", 0), ("out", 1)][:2 - _is_backward(call)]
    metas = {"in": call.inputs, "out": call.outputs}
    inner = (InnerCollective("mirror", f"{side}{i}", halved=tuple(metas[side][i].logical_dims(QUERIES))) for side, i in names)
    return replace(row, inner=(*row.inner, *inner))


def over_split_queries(base: Rule) -> Rule:
    """`base`, of an attention of the CPU or its backward, with a local form for rows that split the queries of a causal one."""
    def local(ctx: LocalContext, *args: Any, **kwargs: Any) -> Any:
        axes = input_axes(ctx, ctx.call.argument("query").index, QUERIES)
        if axes and ctx.call.argument("is_causal"):
            return _own_rows(ctx, axes, _named(ctx.call, args, kwargs))
        return base.local(ctx, *args, **kwargs) if base.local else ctx.call.target(*args, **kwargs)

    return replace(adjust(base, with_swaps), local=local)


def _named(call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip((a.name for a in call.target._schema.arguments), args, strict=False)), **kwargs}


def _is_backward(call: Call) -> bool:
    return call.given("grad_out") is not None


def _own_rows(ctx: LocalContext, axes: Sequence[int], given: dict[str, Any]) -> Any:
    """Of both ends of the sequence: the first half of the rows here, and the second half of those of the mirrored rank."""
    rows = ctx.local_in(ctx.call.argument("query").index)[QUERIES]
    last, here = ctx.ranks(axes) - 1, ctx.index(axes)
    first, second = causal_rows.lengths(rows, 2)
    begins = [here * rows, (here * -1 + last) * rows + first][:1 + (second > 0)]

    def swap(x: Any) -> Any:
        if not second:
            return x
        return aten.cat.default([aten.slice.Tensor(x, QUERIES, 0, first), ctx.mirror(aten.slice.Tensor(x, QUERIES, first, rows), axes)], QUERIES)

    tensors = {name: swap(given[name]) if name in SENT else given[name] for name in ARGUMENTS if name in given}
    if _is_backward(ctx.call):
        query, *keys = causal_rows.BACKWARD(*tensors.values(), begins, scale=given.get("scale"))
        return swap(query), *keys
    return tuple(swap(x) for x in causal_rows.FORWARD(*tensors.values(), begins, scale=given.get("scale")))
