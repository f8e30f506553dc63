"""Causal attention of some rows of a sequence, wherever they stand in it: what a rank runs whose queries are split along the sequence.

A run of n queries that begins at position p sees the keys before p, all of them, and of its own n keys those up to its row. So it is two
calls of any kernel, one without a mask and one causal and square, merged by their log-sum-exp:

    lse = log(exp(lse_1) + exp(lse_2))        out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2

Backward calls the kernel's own backward on both parts with the merged `out` and `lse`: weights are exp(score - lse) then, and what is
subtracted from their gradients, sum(grad out), is that of the whole row. Source of the merge: Milakov and Gimelshein, "Online normalizer
calculation for softmax", arXiv 1805.02867; of a backward by blocks: Dao, FlashAttention-2, arXiv 2307.08691, section 3.1.2.

Positions differ from rank to rank, and so do the shapes inside; those of arguments and results do not. Hence two ops of our own.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from autoshard.base.custom_op import custom_op
from autoshard.rules.parts import accumulate_dtype

aten = torch.ops.aten
Tensor = torch.Tensor
Kernel = Callable[..., Any]
"""Attention, or its backward, with the arguments and results of the CPU's op."""


def attend(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, begins: Sequence[int], scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Output [b, h, n, e] and log-sum-exp [b, h, n] of queries [b, h, n, d], which consist of runs (see `lengths`): run i stands at `begins[i]`
    of the sequence, of which `key` and `value` have all. Tokens come before heads in memory, as the CPU kernel has them."""
    out, lse = _empty_result(query, value)
    for here, begin, own in _runs(query, begins):
        part, logs, *_ = kernel(query[:, :, here], key[:, :, own], value[:, :, own], 0.0, True, scale=scale)
        if begin:
            before, earlier, *_ = kernel(query[:, :, here], key[:, :, :begin], value[:, :, :begin], 0.0, False, scale=scale)
            both = torch.logaddexp(logs, earlier)
            part = part * (logs - both).exp_().unsqueeze(-1)
            part += before * (earlier - both).exp_().unsqueeze(-1)
            logs = both
        out[:, :, here], lse[:, :, here] = part, logs
    return out, lse


def attend_backward(kernel: Kernel, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, begins: Sequence[int],
                    scale: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the queries here, and what these add to those of all keys and values. `out`, `lse`: as `attend` gave them."""
    dq, dk, dv = _empty_gradients(query, key, value)
    dk.zero_(), dv.zero_()
    for here, begin, own in _runs(query, begins):
        mine = [t[:, :, here] for t in (grad, query, out, lse)]
        dq[:, :, here] = _add_part(kernel, mine, key, value, own, dk, dv, True, scale)
        if begin:
            dq[:, :, here] += _add_part(kernel, mine, key, value, slice(0, begin), dk, dv, False, scale)
    return dq, dk, dv


def _add_part(kernel: Kernel, mine: Sequence[Tensor], key: Tensor, value: Tensor, seen: slice, dk: Tensor, dv: Tensor, causal: bool,
              scale: float | None) -> Tensor:
    """The queries' gradient through the keys `seen`; theirs are added in place."""
    grad, query, out, lse = mine
    made: tuple[Tensor, ...] = kernel(grad, query, key[:, :, seen], value[:, :, seen], out, lse, 0.0, causal, scale=scale)
    dk[:, :, seen] += made[1]
    dv[:, :, seen] += made[2]
    return made[0]


def lengths(rows: int, runs: int) -> list[int]:
    """How long the runs of `rows` queries are: as equal as can be, longer ones first, as torch.tensor_split cuts them."""
    return [rows // runs + (i < rows % runs) for i in range(runs)]


def _runs(query: Tensor, begins: Sequence[int]) -> Iterator[tuple[slice, int, slice]]:
    """Of each run its rows here, where it begins, and its rows in the sequence."""
    at = 0
    for begin, n in zip(begins, lengths(query.shape[2], len(begins)), strict=True):
        yield slice(at, at + n), begin, slice(begin, begin + n)
        at += n


def _empty_result(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    b, h, n, _ = query.shape
    return _tokens_first(query, b, h, n, value.shape[-1]), query.new_empty((b, n, h), dtype=accumulate_dtype(query.dtype)).transpose(1, 2)


def _empty_gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(_tokens_first(t, *t.shape) for t in tensors)


def _tokens_first(like: Tensor, b: int, h: int, n: int, d: int) -> Tensor:
    out: Tensor = like.new_empty((b, n, h, d)).transpose(1, 2)
    return out


def _forward_on_cpu(query: Tensor, key: Tensor, value: Tensor, begins: Sequence[int], scale: float | None = None) -> tuple[Tensor, Tensor]:
    return attend(aten._scaled_dot_product_flash_attention_for_cpu.default, query, key, value, begins, scale)


def _backward_on_cpu(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, begins: Sequence[int],
                     scale: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    return attend_backward(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, grad, query, key, value, out, lse, begins, scale)


FORWARD = custom_op(
    "causal_rows", "(Tensor query, Tensor key, Tensor value, int[] begins, float? scale=None) -> (Tensor, Tensor)", _forward_on_cpu,
    lambda query, key, value, begins, scale=None: _empty_result(query, value))
BACKWARD = custom_op(
    "causal_rows_backward", "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, int[] begins, float? scale=None) "
    "-> (Tensor, Tensor, Tensor)", _backward_on_cpu,
    lambda grad, query, key, value, out, lse, begins, scale=None: _empty_gradients(query, key, value))


def workspace(target: Any, args: Sequence[Any]) -> int:
    """Bytes of temporaries that an op of this file has beside its results, on the rank that has most: the last one, before whose rows are
    most keys. `args`: (fake) tensors; 0 for other ops."""
    if target not in (FORWARD, BACKWARD):
        return 0
    query, key, value, begins = *args[target is BACKWARD:][:3], args[3 if target is FORWARD else 6]
    b, h, n, d = query.shape
    rows, size, wide = lengths(n, len(begins))[0], query.dtype.itemsize, accumulate_dtype(query.dtype).itemsize
    if target is FORWARD:  # the output before, two wide products; five log-sum-exps
        return int(b * h * rows * (value.shape[-1] * (size + 2 * wide) + 5 * wide))
    return int(b * size * (h * rows * d + key.shape[1] * (key.shape[2] - rows) * (d + value.shape[-1])))
