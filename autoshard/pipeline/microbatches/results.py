"""Results of a batch from those of its micro-batches, and what part of the batch's loss each of these is."""
from __future__ import annotations

from collections.abc import Sequence
from math import log2
from typing import Any

import torch

from autoshard.base.graph import Graph, TensorMeta
from autoshard.base.roles import Role
from autoshard.base.windows import CAT, JOIN_DIM, MEAN, SAME, WEIGHTED, WEIGHTS, batch_dim_of, join_of


def piece(t: torch.Tensor, dim: int | None, m: int, count: int) -> torch.Tensor:
    """The part of an input that micro-batch `m` of `count` reads."""
    if dim is None:
        return t
    rows = t.shape[dim] // count
    return t.narrow(dim, m * rows, rows)


def pieces_of(graph: Graph, tensors: Sequence[torch.Tensor], m: int) -> list[torch.Tensor]:
    """The inputs of the graph for micro-batch `m`, from those of the batch."""
    if graph.microbatches == 1:
        return list(tensors)
    return [piece(t, batch_dim_of(op), m, graph.microbatches) for op, t in zip(graph.of_kind("input"), tensors, strict=True)]


def joined_meta(meta: TensorMeta, how: str, dim: int, count: int) -> TensorMeta:
    """Of the batch's output, from that of a micro-batch."""
    return TensorMeta((*meta.shape[:dim], count * meta.shape[dim], *meta.shape[dim + 1:]), meta.dtype) if how == CAT else meta


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over micro-batches are kept in. A number of eight bits grows no more once it is 256 times as large as what is added to it."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point or dtype.is_complex else dtype


def weight_dtype(dtype: torch.dtype) -> torch.dtype:
    """What weights are added up and divided in: an integer over a number would be float32, whatever the loss is."""
    return sum_dtype(dtype) if dtype.is_floating_point else torch.float64


class Results:
    """User outputs of the batch, put together from those of its micro-batches as these arrive. `counts`: whether the last one has any
    weight in the loss; the gradient of a mean of nothing is no number, and its part of the batch's is zero. Other results may have weights where
    the loss has none."""

    def __init__(self, graph: Graph) -> None:
        ops = list(graph.outputs(Role.USER).values())
        self.ways = [(join_of(op), dict(op.kwargs)[JOIN_DIM]) for op in ops]
        self.count, self.values = graph.microbatches, [None] * len(ops)
        self.total: torch.Tensor | None = None
        self.weight: torch.Tensor | None = None
        self.counts = True
        losses = [op.target for op in graph.of_kind("tangent") if not op.is_port]
        self.loss_has_weights = any(self.ways[loss][0] == WEIGHTED for loss in losses)
        self.metas = [graph.meta(op.refs[0]) for op in ops]
        terms = [dict(op.kwargs)[WEIGHTS] for op in ops if join_of(op) == WEIGHTS]
        self.means = any(self.ways[loss][0] == MEAN for loss in losses)
        self.scale = float(terms[0] * self.count) if self.loss_has_weights and terms else float(self.count) if self.means else 1.0
        if any(sum_dtype(dtype) != dtype for dtype in (self.metas[loss].dtype for loss in losses)):
            self.scale = 2.0 ** round(log2(self.scale))

    def add(self, m: int, outs: list[Any]) -> None:
        """Results of micro-batch `m`, which the list gives up."""
        self.weight = weight = next((outs[i] for i, (how, _) in enumerate(self.ways) if how == WEIGHTS), None)
        if weight is not None:
            self.weight = weight = weight.to(weight_dtype(weight.dtype))
            self.total = weight if self.total is None else self.total + weight
            self.counts = not self.loss_has_weights or bool(weight != 0)
        for i, (how, dim) in enumerate(self.ways):
            value, outs[i] = outs[i], None
            self.values[i] = self._joined(self.values[i], value, m, how, dim, weight)

    def tangent(self, loss: int) -> torch.Tensor:
        """The part of the batch's loss that the last micro-batch's is, up to `factor`: its weight, or 1, over `scale`. A tangent has the loss's
        dtype. In a narrow one a quotient would be rounded, the same way in every micro-batch, so `scale` is a power of two there, near
        the sum of all weights: quotients by it have the digits of the weights, and are near 1 / M."""
        how, dtype = self.ways[loss][0], self.metas[loss].dtype
        if how == WEIGHTED and self.weight is not None:
            return (self.weight / self.scale).to(dtype)
        return torch.full((), 1.0 / self.scale, dtype=dtype)

    @property
    def factor(self) -> torch.Tensor | None:
        """What gradients of such tangents must be multiplied by at the end, wider than they are; None: by nothing. Before any results: what it is
        whatever the weights are. Those of a batch in which nothing counts are zeros, as those of `cross_entropy` are where all targets are
        ignored."""
        if self.means and self.scale != self.count:
            return torch.full((), self.scale / self.count, dtype=torch.float64)
        if self.total is None or not self.loss_has_weights:
            return None
        return torch.where(self.total != 0, self.scale / self.total, torch.zeros_like(self.total))

    def _joined(self, so_far: Any, value: torch.Tensor, m: int, how: str, dim: int, weight: torch.Tensor | None) -> Any:
        if how == CAT:
            rows = value.shape[dim]
            if so_far is None:
                shape = [*value.shape[:dim], self.count * rows, *value.shape[dim + 1:]]
                so_far = torch.empty(shape, dtype=value.dtype, device=value.device)
            so_far.narrow(dim, m * rows, rows).copy_(value)
            return so_far
        if how == SAME or how == WEIGHTS:
            return value
        value = value.to(sum_dtype(value.dtype), copy=so_far is None)
        if how == WEIGHTED:
            value = torch.where(weight != 0, value * weight, torch.zeros_like(value))
        return value if so_far is None else so_far.add_(value)

    def finished(self) -> list[torch.Tensor]:
        """All but weights."""
        over = {MEAN: self.count, WEIGHTED: self.total if self.total is not None else 1.0}
        return [(v / over[how] if how in over else v).to(meta.dtype)
                for v, (how, _), meta in zip(self.values, self.ways, self.metas, strict=True) if how != WEIGHTS]
