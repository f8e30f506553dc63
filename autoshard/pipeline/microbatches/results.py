"""Results of a batch from those of its micro-batches, and what part of the batch's loss each of these is."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autoshard.base.graph import Graph, TensorMeta
from autoshard.base.roles import Role
from autoshard.base.windows import CAT, JOIN_DIM, MEAN, SAME, SUM, WEIGHTED, WEIGHTS, batch_dim_of, join_of


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


def weight_dtype(dtype: torch.dtype) -> torch.dtype:
    """What weights are added up and divided in: an integer over a number would be float32, whatever the loss is."""
    return dtype if dtype.is_floating_point else torch.float64


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
        self.scale = float(terms[0] * graph.microbatches) if terms else 1.0  # about the sum of all weights: it keeps tangents near 1

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
        """The part of the batch's loss that the last micro-batch's is; with weights, up to `factor`."""
        how, dtype = self.ways[loss][0], self.metas[loss].dtype
        if how == WEIGHTED and self.weight is not None:
            return (self.weight / self.scale).to(dtype)
        return torch.full((), 1.0 if how == SUM else 1.0 / self.count, dtype=dtype)

    @property
    def factor(self) -> torch.Tensor | None:
        """What gradients of such tangents must be multiplied by at the end; None: by nothing. Those of a batch in which nothing counts are zeros, as
        those of `cross_entropy` are where all targets are ignored."""
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
        if how == WEIGHTED:
            value = torch.where(weight != 0, value * weight, torch.zeros_like(value))
        elif how == SAME or how == WEIGHTS:
            return value
        return value.clone() if so_far is None else so_far.add_(value)

    def finished(self) -> list[torch.Tensor]:
        """All but weights."""
        scale = {MEAN: 1.0 / self.count, WEIGHTED: 1.0 if self.total is None else 1.0 / self.total}
        return [(v * scale[how]).to(meta.dtype) if how in scale else v
                for v, (how, _), meta in zip(self.values, self.ways, self.metas, strict=True) if how != WEIGHTS]
