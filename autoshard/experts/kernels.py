"""The steps of a layer of experts on one rank, on real tensors.

T tokens go to k experts each; S = T k rows, row i being token i // k. Experts are cut into `pieces` runs of equal length. Where tokens
travel, the ranks of a mesh axis exchange rows: `ways` of them, each with the experts of its own piece.

    sort_rows      ids [T, k] -> order [T, k]: the numbers of all rows by expert, those that stay out last
    count_rows     ids [T, k] -> counts [experts], block by block of where rows go
    run_rows       rows [C, d] as they came, counts of each sender -> results [C, d] in the same places
    combine_rows   results [S, d] -> [T, d], the weighted sum of each token

A rank that gets more rows than a buffer has room for raises UsageError: nothing is dropped.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from autoshard.experts.activations import activate, activate_backward
from autoshard.experts.grouped import outer_products, products


def sort_rows(ids: Tensor, experts: int, pieces: int, ways: int, inner: int, mine: int) -> Tensor:
    """The order of rows [T, k]. A piece is one of `ways` along the axis over which tokens travel, `inner` pieces apart; rows for pieces that
    differ from piece `mine` otherwise are of no concern here: they come last."""
    return torch.argsort(_places(ids, experts, pieces, ways, inner, mine), stable=True).reshape(ids.shape)


def count_rows(ids: Tensor, experts: int, pieces: int, ways: int, inner: int, mine: int) -> Tensor:
    """How many rows go to each expert [experts], those of no concern left out. Of the `experts // ways` counts for each way the first
    `experts // pieces` are used, one per expert of the piece."""
    places = _places(ids, experts, pieces, ways, inner, mine)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(0, places, torch.ones_like(places))[:experts]


def _places(ids: Tensor, experts: int, pieces: int, ways: int, inner: int, mine: int) -> Tensor:
    held, flat = experts // pieces, ids.reshape(-1)
    piece = flat // held
    way, own = piece // inner % ways, mine // inner % ways
    concerns = piece - way * inner == mine - own * inner
    return torch.where(concerns, way * (experts // ways) + flat % held, experts)


@dataclass(frozen=True)
class Arrived:
    """Rows as they came: `total` of them, sender by sender and each sender's by expert; `by_expert`: how they are sorted by expert alone
    (None: they are); `counts` of each expert."""

    total: int
    by_expert: Tensor | None
    counts: Tensor

    @staticmethod
    def of(got: Tensor, ways: int, held: int) -> Arrived:
        """`got`: counts that came from each way; the first `held` of each are used."""
        each = got.reshape(ways, -1)[:, :held]
        counts = each.sum(0)
        if ways == 1:
            return Arrived(int(counts.sum()), None, counts)
        expert = torch.arange(held, device=got.device).repeat(ways).repeat_interleave(each.reshape(-1))
        return Arrived(len(expert), torch.argsort(expert, stable=True), counts)

    def sorted(self, rows: Tensor) -> Tensor:
        rows = rows[:self.total]
        return rows if self.by_expert is None else rows.index_select(0, self.by_expert)

    def back(self, rows: Tensor, like: Tensor) -> Tensor:
        """Sorted rows in the places where they came, zeros after them."""
        out = rows.new_zeros(len(like), *rows.shape[1:])
        out[:self.total] = rows if self.by_expert is None else torch.empty_like(rows).index_copy_(0, self.by_expert, rows)
        return out


def run_rows(rows: Tensor, got: Tensor, ways: int, up: Tensor, down: Tensor, activation: str, gated: bool,
             kept: int) -> tuple[Tensor, Tensor, Tensor]:
    """(results [C, d]; of what the first matmul makes the first `kept` sorted rows, zeros where there are fewer; rows of each expert).
    up [held, a, d] with a = f, or 2 f if `gated`; down [held, d, f]."""
    came = Arrived.of(got, ways, len(up))
    h = products(came.sorted(rows), up.transpose(1, 2), came.counts)
    results = products(activate(h, activation, gated), down.transpose(1, 2), came.counts)
    saved = h.new_zeros(kept, h.shape[1])
    saved[:min(kept, came.total)] = h[:kept]
    return came.back(results, rows), saved, came.counts.double()


def run_rows_backward(grad: Tensor, rows: Tensor, weights: Tensor, got: Tensor, ways: int, up: Tensor, down: Tensor, saved: Tensor,
                      activation: str, gated: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the rows [C, d], of their weights [C], of `up` and of `down`. `grad` [C, d]: of each row's token, not weighted yet.

    With z the result of a row before its weight w, dz = w g, and dw = <g, z> = <g down, activated>: z itself is not needed."""
    came = Arrived.of(got, ways, len(up))
    g, x, w = came.sorted(grad), came.sorted(rows), came.sorted(weights)
    h = _whole(saved, x, up, came)
    a, towards_a = activate(h, activation, gated), products(g, down, came.counts)
    sums = torch.promote_types(a.dtype, torch.float32)
    grad_weights = (towards_a.to(sums) * a.to(sums)).sum(1).to(w.dtype)
    w = w.to(g.dtype).unsqueeze(1)
    grad_h = activate_backward(towards_a * w, h, activation, gated)
    grad_down = outer_products(g * w, a, came.counts)
    grad_up = outer_products(grad_h, x, came.counts)
    return came.back(products(grad_h, up, came.counts), grad), came.back(grad_weights, grad), grad_up, grad_down


def _whole(saved: Tensor, x: Tensor, up: Tensor, came: Arrived) -> Tensor:
    """What the first matmul makes, of all rows: those that there was no room to save are computed again."""
    if came.total <= len(saved):
        return saved[:came.total]
    ends = torch.cumsum(came.counts, 0)
    beyond = (ends - len(saved)).clamp(min=0)
    counts = torch.diff(beyond, prepend=beyond.new_zeros(1))
    return torch.cat([saved, products(x[len(saved):], up.transpose(1, 2), counts)])


def combine_rows(rows: Tensor, order: Tensor, weights: Tensor | None, k: int, dtype: torch.dtype) -> Tensor:
    """[S, d] in the order of `order` [S] -> [T, d] in `dtype`: of each token the sum of its k rows, by `weights` [T, k]."""
    own = torch.empty_like(rows).index_copy_(0, order, rows).unflatten(0, (-1, k))
    return (own if weights is None else own * weights.unsqueeze(-1)).sum(1).to(dtype)


def place_rows(values: Tensor, order: Tensor, k: int) -> Tensor:
    """[S] in the order of `order` -> [T, k]."""
    return torch.empty_like(values).index_copy_(0, order, values).unflatten(0, (-1, k))
