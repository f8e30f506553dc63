"""Products of rows that are sorted by expert with the matrix of each expert."""
from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

UNIT = 16
"""Bytes that the length of rows must be a multiple of for torch's grouped matmul."""


def products(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x [rows, k], weight [experts, k, n], counts [experts] that add up to rows -> [rows, n]."""
    if _has_kernel(x, weight):
        return functional.grouped_mm(x, weight, offs=torch.cumsum(counts, 0, dtype=torch.int32))
    out = x.new_empty(len(x), weight.shape[2])
    sizes = counts.tolist()
    for x_e, w_e, out_e in zip(x.split(sizes), weight, out.split(sizes), strict=True):
        if len(x_e):
            torch.mm(x_e, w_e, out=out_e)
    return out


def outer_products(a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
    """a [rows, m], b [rows, n] -> [experts, m, n]: of each expert the sum over its rows; zeros where it has none."""
    if _has_kernel(a, b):
        return functional.grouped_mm(a.t(), b, offs=torch.cumsum(counts, 0, dtype=torch.int32))
    out = a.new_zeros(len(counts), a.shape[1], b.shape[1])
    sizes = counts.tolist()
    for a_e, b_e, out_e in zip(a.split(sizes), b.split(sizes), out, strict=True):
        if len(a_e):
            torch.mm(a_e.t(), b_e, out=out_e)
    return out


def _has_kernel(a: Tensor, b: Tensor) -> bool:
    """Whether torch's own op takes these: bfloat16 on CUDA, rows of whole units. Elsewhere it is the loop below, at best."""
    sizes = (*a.shape[1:], *b.shape[1:])
    return a.is_cuda and a.dtype == b.dtype == torch.bfloat16 and all(n * a.itemsize % UNIT == 0 for n in sizes) and len(a) > 0
