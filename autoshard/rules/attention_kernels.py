"""Attention on other devices: functions that replace the two CPU attention ops of a trace.

A model is traced with CPU tensors, so its graph holds `_scaled_dot_product_flash_attention_for_cpu` and its backward. Plans know
of one value saved between the two beside the output, the log-sum-exp of every row. The functions here take and give just
what those ops do, in the same memory layout, and run one of three kernels:

    flash       half precision without a mask: FlashAttention
    efficient   the memory-efficient kernel: float32 too, and masks
    math        matmuls over the whole matrix of scores: what neither takes (float64, odd head sizes)

Which one follows from the arguments that forward and backward share, so backward meets the rows its forward made. Nothing is
dropped in any of them: with dropout torch traces the matmuls themselves.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.nn.functional import pad

from autoshard.errors import LoweringError
from autoshard.rules.ops import causal_rows

aten = torch.ops.aten
Tensor = torch.Tensor
HALF = (torch.float16, torch.bfloat16)
HEAD_STEP, FLASH_HEAD = 8, 256
"""Head sizes that the fused kernels take: multiples of 8 elements (16 bytes in half precision); flash none above 256."""
BIAS_STEP, ROW_STEP = 16, 32
"""Elements that a row of the efficient kernel's bias, and its rows' log-sum-exp, are padded to a multiple of."""


def attention(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
              attn_mask: Tensor | None = None, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Output [b, h, s, d] and log-sum-exp [b, h, s]; keys and values may have fewer heads, of which each serves h / heads
    of the query. Causal rows start at the first key. Raises LoweringError for dropout."""
    _no_dropout(dropout_p)
    query, key, value = map(_rows_dense, (query, key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    run = FORWARD[kernel_of(query, key, is_causal, attn_mask)]
    out, lse = run(query, key, value, is_causal, attn_mask, scale)
    return _in_memory_like(out, query), _tokens_first(lse)


def attention_backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, dropout_p: float,
                       is_causal: bool, *, attn_mask: Tensor | None = None, scale: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, with the tokens before the heads in memory. Raises as `attention`."""
    _no_dropout(dropout_p)
    query, key, value = map(_rows_dense, (query, key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    run = BACKWARD[kernel_of(query, key, is_causal, attn_mask)]
    grad_query, grad_key, grad_value = run(grad_out, query, key, value, out, logsumexp, is_causal, attn_mask, scale)
    return _tokens_first(grad_query), _tokens_first(grad_key), _tokens_first(grad_value)


def causal_rows_of(query: Tensor, key: Tensor, value: Tensor, begins: Sequence[int], scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Causal attention of runs of a sequence, by `attention`."""
    return causal_rows.attend(attention, query, key, value, begins, scale)


def causal_rows_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, begins: Sequence[int],
                         scale: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Its gradients, by `attention_backward`."""
    return causal_rows.attend_backward(attention_backward, grad, query, key, value, out, lse, begins, scale)


def kernel_of(query: Tensor, key: Tensor, is_causal: bool, mask: Tensor | None) -> str:
    """"flash", "efficient" or "math"."""
    head, half = query.shape[-1], query.dtype in HALF
    if head % HEAD_STEP or not (half or query.dtype is torch.float32) or half and not _has_half_kernels(query.device):
        return "math"
    # flash aligns a causal mask that is not square at the last key
    if not half or mask is not None or head > FLASH_HEAD or is_causal and query.shape[2] != key.shape[2]:
        return "efficient"
    return "flash"


@cache
def _has_half_kernels(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


# --- flash -------------------------------------------------------------------------------------------

def _flash(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, mask: None, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention.default(query, key, value, 0.0, is_causal, False, scale=scale)
    return out, lse


def _flash_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, is_causal: bool, mask: None,
                    scale: float) -> tuple[Tensor, Tensor, Tensor]:
    seed, offset = query.new_empty(2, dtype=torch.uint64), query.new_empty((), dtype=torch.uint64)  # read with dropout only
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward.default(
        _tokens_first(grad), query, key, value, _tokens_first(out), lse.contiguous(), None, None, query.shape[2], key.shape[2], 0.0,
        is_causal, seed, offset, scale=scale)
    return dq, dk, dv


# --- efficient ---------------------------------------------------------------------------------------

def _efficient(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_efficient_attention.default(
        query, _per_query_head(key, query), _per_query_head(value, query), _bias(mask, query, key), True, 0.0, is_causal, scale=scale)
    return out, lse[..., :query.shape[2]]


def _efficient_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, is_causal: bool,
                        mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    seed, offset = (query.new_empty((), dtype=torch.int64) for _ in range(2))  # read with dropout only
    rows = pad(lse, (0, -lse.shape[-1] % ROW_STEP), value=float("inf")).contiguous()  # a row that is not there has weight 0
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward.default(
        _tokens_first(grad), query, _per_query_head(key, query), _per_query_head(value, query), _bias(mask, query, key),
        _tokens_first(out), rows, seed, offset, 0.0, [True, True, True, False], is_causal, scale=scale)
    return dq, _per_own_head(dk, key), _per_own_head(dv, value)


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask for every head, in rows whose memory is aligned."""
    if mask is None:
        return None
    keys = key.shape[2]
    rows = mask.to(query.dtype).expand(*mask.shape[:-1], keys)
    rows = pad(rows, (0, -keys % BIAS_STEP)).contiguous()[..., :keys]
    return rows.expand(*query.shape[:3], keys)


# --- math --------------------------------------------------------------------------------------------

def _math(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, is_causal, mask, scale)
    lse = scores.logsumexp(-1)
    return (_weights(scores, lse) @ _wide(_per_query_head(value, query))).to(query.dtype), lse


def _math_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, is_causal: bool,
                   mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """With p the weights: dv = p' do, dp = do v', ds = p (dp - sum(do out)), dq = ds k, dk = ds' q."""
    grad, dtype = _wide(grad), query.dtype
    weights = _weights(_scores(query, key, is_causal, mask, scale), lse)
    change = grad @ _wide(_per_query_head(value, query)).mT - (grad * _wide(out)).sum(-1, keepdim=True)
    scores = weights * change * scale
    dq, dk, dv = scores @ _wide(_per_query_head(key, query)), scores.mT @ _wide(query), weights.mT @ grad
    return dq.to(dtype), _per_own_head(dk, key).to(dtype), _per_own_head(dv, value).to(dtype)


def _scores(query: Tensor, key: Tensor, is_causal: bool, mask: Tensor | None, scale: float) -> Tensor:
    scores = _wide(query) @ _wide(_per_query_head(key, query)).mT * scale
    if mask is not None:
        scores = scores + mask
    if is_causal:
        later = scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """A row that sees no key has no weights."""
    return (scores - lse.unsqueeze(-1)).exp().masked_fill(lse.isneginf().unsqueeze(-1), 0.0)


def _wide(t: Tensor) -> Tensor:
    """At least float32, which the fused kernels sum in."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


# --- heads and memory --------------------------------------------------------------------------------

def _per_query_head(t: Tensor, query: Tensor) -> Tensor:
    """Keys or values once for every head of the query."""
    times = query.shape[1] // t.shape[1]
    return t if times == 1 else t.repeat_interleave(times, 1, output_size=query.shape[1])


def _per_own_head(grad: Tensor, t: Tensor) -> Tensor:
    """Sum over the heads that share one of `t`."""
    return grad if grad.shape[1] == t.shape[1] else grad.unflatten(1, (t.shape[1], -1)).sum(2)


def _rows_dense(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _tokens_first(t: Tensor) -> Tensor:
    """[b, h, s, ...] with s before h in memory: how the CPU kernels lay out gradients and rows, and what the backward kernels
    take for granted."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def _in_memory_like(t: Tensor, like: Tensor) -> Tensor:
    """`t` in the memory layout that a new tensor like `like` has."""
    target = torch.empty_like(like)
    return t if t.stride() == target.stride() else target.copy_(t)


def _no_dropout(p: float) -> None:
    if p:
        raise LoweringError(f"attention with dropout_p={p} was traced as one op, whose random numbers other devices do not repeat; "
                            "set dropout_p=0 in it and drop out afterwards")


FORWARD: dict[str, Callable[..., Any]] = {"flash": _flash, "efficient": _efficient, "math": _math}
BACKWARD: dict[str, Callable[..., Any]] = {"flash": _flash_backward, "efficient": _efficient_backward, "math": _math_backward}
ELSEWHERE: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: attention_backward,
    causal_rows.FORWARD: causal_rows_of,
    causal_rows.BACKWARD: causal_rows_backward,
}
