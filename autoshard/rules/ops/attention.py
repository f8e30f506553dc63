"""Scaled dot-product attention in all its backends: batch, heads (grouped too: shared_heads.py) and the query's sequence, of causal attention
as far as split_queries.py can run it; and the keys' where there are more of them than queries, as in a cache (split_keys.py).

The letters of every tensor follow from its schema name, so one table serves all backends."""
from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from autoshard.base.graph import Call, TensorMeta
from autoshard.base.spec import PSUM, R
from autoshard.rules.family import Family
from autoshard.rules.notation import rule
from autoshard.rules.ops.shared_heads import over_shared_heads
from autoshard.rules.ops.split_keys import over_split_keys
from autoshard.rules.ops.split_queries import may_split, mean_keys, over_split_queries
from autoshard.rules.parts import adjust
from autoshard.rules.types import Row, Rule

aten = torch.ops.aten

DIMS = {"query": "b h s d", "key": "b h t d", "value": "b h t e", "out": "b h s e"}
ALIASES = {"grad_out": "out", "grad_out_": "out", "output": "out", "grad_query": "query", "grad_key": "key",
           "grad_value": "value", "grad_attn_bias": "attn_bias", "attn_mask": "attn_bias",
           "logsumexp": "lse", "log_sumexp": "lse"}
FORWARD = ("output", "logsumexp", "", "", "", "", "", "", "")
GRADS = ("grad_query", "grad_key", "grad_value", "grad_attn_bias")
MOVES_QUERIES = ("flash_attention_for_cpu", "efficient_attention")
"""Backends whose query sequence may split: the others take its length as an argument."""
RUNS_ROWS = "flash_attention_for_cpu"
"""The backend, that of traces, whose query sequence may split under a causal mask too."""


def _term(name: str, meta: TensorMeta | None, whole: frozenset[str]) -> str:
    """Letters of one tensor, `whole` ones marked; tensors without a sharded dim get letters of their own."""
    name, ndim = ALIASES.get(name, name), len(meta.shape) if meta else 0
    if name in DIMS:
        found = DIMS[name].split()
    elif name == "attn_bias":
        found = "b h s t".split()[4 - ndim:] if ndim else []
    elif name == "lse" and ndim >= 3:
        found = ["b", "h", "s", *(f"{name}{d}!" for d in range(3, ndim))]
    else:
        found = [f"{name or 'x'}{d}!" for d in range(ndim)]
    return " ".join(f"{x}!" if x in whole else x for x in found)


def _line(call: Call, outputs: Sequence[str]) -> str:
    names = [a.name for a in call.target._schema.arguments if "Tensor" in str(a.type)]
    whole = _whole_letters(call)
    left = [_term(n, call.given(n), whole) for n in names]
    right = [_term(n, m, whole) for n, m in zip(outputs, call.outputs, strict=False)]
    return f"{', '.join(left)} -> {', '.join(right)}"


def _whole_letters(call: Call) -> frozenset[str]:
    """Dropout draws from the backend's own generator, which knows no shards: then nothing splits."""
    if call.argument("dropout_p"):
        return frozenset("bhstde")
    queries = call.tensor("query").shape[2]
    lse = call.given("logsumexp") or (call.outputs[1] if len(call.outputs) > 1 else None)
    padded = lse is not None and len(lse.shape) > 2 and lse.shape[2] != queries
    free = any(b in str(call.target) for b in MOVES_QUERIES) and not padded
    if call.argument("is_causal"):
        free &= RUNS_ROWS in str(call.target) and may_split(call)
    return frozenset("tde" if free else "stde")


def forward_flops(call: Call, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """2 b h s t (d + e) for q k' and p v; half of it when causal, and of split queries what the slowest rank has to do.

    b, h: batch and heads; s, t: query and key lengths; d, e: head sizes of keys and values.
    Source: Dao, FlashAttention-2 (arXiv 2307.08691), section 4.1: 4 seqlen^2 d heads, halved when causal.
    """
    names = [a.name for a in call.target._schema.arguments]
    found = {}
    for name in ("query", "key", "value"):
        slot = call.args[names.index(name)].index
        meta, local = call.inputs[slot], inputs[slot]
        found[name] = [prod(local[i] for i in meta.logical_dims(d)) for d in range(len(meta.shape))]
    (b, h, s, d), t, e = found["query"], found["key"][2], found["value"][3]
    return 2.0 * b * h * s * (mean_keys(call, s, t) if call.argument("is_causal") else t) * (d + e)


def backward_flops(call: Call, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """2.5 x the forward: five products instead of two. Source: as `forward_flops`."""
    return 2.5 * forward_flops(call, inputs, outputs)


def _attention(outputs: Sequence[str], flops: Any) -> Rule:
    return rule(lambda call: _line(call, outputs), family=Family.ATTENTION, flops=flops)


def _side_outputs_whole(call: Call, row: Row) -> Row:
    """Random state and the like are not sums over shards: they are equal everywhere."""
    return Row(row.inputs, tuple(R if p == PSUM else p for p in row.outputs))


FORWARD_RULE = adjust(_attention(FORWARD, forward_flops), _side_outputs_whole)
BACKWARD_RULE = _attention(GRADS, backward_flops)

RULES = {
    **{op.default: FORWARD_RULE
       for op in (aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention,
                  aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_fused_attention_overrideable)},
    aten._scaled_dot_product_flash_attention_for_cpu.default: over_shared_heads(over_split_queries(over_split_keys(FORWARD_RULE))),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: over_shared_heads(over_split_queries(BACKWARD_RULE)),
    **{op.default: BACKWARD_RULE
       for op in (aten._scaled_dot_product_flash_attention_backward,
                  aten._scaled_dot_product_efficient_attention_backward,
                  aten._scaled_dot_product_cudnn_attention_backward,
                  aten._scaled_dot_product_fused_attention_overrideable_backward)},
}
