"""Layers of experts (experts/ops.py): each token's rows go to its experts and come back, summed.

Over one mesh axis of n ranks, of T tokens and E experts:

    hidden    all tokens, a share of the hidden dim of every expert     results Partial
    here      all tokens, E / n experts: the others' rows stay out      results Partial
    tokens    T / n tokens, all experts                                 gradients of weights Partial
    travel    T / n tokens and E / n experts: rows go to the rank of their expert by all-to-all, and back

How many rows go where is known at run time: ranks exchange counts first. Loads differ, so what here and travel compute and send is
priced with the profile's `imbalance`, and a rank has room for `capacity` times its rows of a balanced load.

Rows of the first matmul's result lie as the layer has sorted them, on the rank that made them: `saved`, `held` and `order` are *private*,
from the forward to its gradient and for nobody else. Their placements tell the ways apart, so that the gradient takes rows the way they went:

              saved        held        order
    whole     Replicate    Replicate   Replicate
    hidden    Shard(last)  Replicate   Replicate
    here      Shard(0)     Shard(0)    Replicate
    tokens    Shard(0)     Partial     Shard(t)
    travel    Shard(0)     Shard(0)    Shard(t)
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import torch

from autoshard.base.graph import Call, TensorMeta
from autoshard.base.spec import PSUM, R, Spec, is_shard
from autoshard.experts.ops import COMBINE_ROWS, COUNT_ROWS, EXPERTS, EXPERTS_BACKWARD, PLACE_ROWS, RUN_ROWS, RUN_ROWS_BACKWARD, SORT_ROWS
from autoshard.rules.family import Family
from autoshard.rules.parts import cast
from autoshard.rules.types import InnerCollective, LocalContext, Row, Rule

aten = torch.ops.aten
FEWEST = 1024
"""Rows that there is room for at least: loads of few rows differ most, and cost little."""


# ---- rows

def _token_dims(x: TensorMeta, ids: TensorMeta, weights: TensorMeta) -> Iterator[int]:
    """Logical dims of the tokens: those that all three have."""
    for j, sizes in enumerate(zip(*(m.factors[0] for m in (x, ids, weights)), strict=False)):
        if len(set(sizes)) > 1:
            return
        yield j


def _hidden_dim(call: Call, up: TensorMeta) -> int | None:
    """The logical dim of `up` that a share of the hidden dim splits; None where gate and up lie one after the other as one dim."""
    if call.argument("gated") and up.parts_of(1) != 2:
        return None
    return up.split_dim(1)


def _forward_rows(call: Call) -> tuple[Row, ...]:
    x, ids, weights, up, down = call.inputs
    saved = call.output(1)
    rows = []
    if (hidden := _hidden_dim(call, up)) is not None:
        rows.append(Row((R, R, R, hidden, down.ndim - 1), (PSUM, saved.ndim - 1, R, R)))
    rows.append(Row((R, R, R, 0, 0), (PSUM, 0, 0, R), uneven=True))
    for t in _token_dims(x, ids, weights):
        rows.append(Row((t, t, t, R, R), (t, 0, PSUM, t)))
        rows.append(Row((t, t, t, 0, 0), (t, 0, 0, t), (_counts(call, 3), *(_sent(call, "out1", saved),) * 2), uneven=True))
    return tuple(rows)


def _backward_rows(call: Call) -> tuple[Row, ...]:
    _, x, ids, weights, up, down, saved, *_ = call.inputs
    rows, last = [], down.ndim - 1
    if (hidden := _hidden_dim(call, up)) is not None:
        rows.append(Row((R, R, R, R, hidden, last, saved.ndim - 1, R, R), (PSUM, PSUM, hidden, last)))
    rows.append(Row((R, R, R, R, 0, 0, 0, 0, R), (PSUM, PSUM, 0, 0), uneven=True))
    row, weight = _sent(call, "in6", saved), _sent(call, "in6", saved, weights)
    for t in _token_dims(x, ids, weights):
        rows.append(Row((t, t, t, t, R, R, 0, PSUM, t), (t, t, PSUM, PSUM)))
        rows.append(Row((t, t, t, t, 0, 0, 0, 0, t), (t, t, 0, 0), (_counts(call, 4), row, row, weight, row, weight), uneven=True))
    return tuple(rows)


def _counts(call: Call, up: int) -> InnerCollective:
    """One number of rows per expert."""
    meta = call.inputs[up]
    return InnerCollective("all_to_all", f"in{up}", "", tuple(range(meta.ndim)), torch.int64, meta.shape[0])


def _sent(call: Call, saved: str, meta: TensorMeta, numbers: TensorMeta | None = None) -> InnerCollective:
    """Rows of x, as many as are saved of a balanced load; or one of `numbers` for each."""
    x, up = call.tensor("x"), call.tensor("up")
    width, dtype = (x.shape[1], up.dtype) if numbers is None else (1, numbers.dtype)
    return InnerCollective("all_to_all_rows", saved, "", tuple(range(1, meta.ndim)), dtype, width)


def _forward_factors(call: Call) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Saved rows are one plain dim, whatever the tokens' is made of; of gate and up in one their number is a dim."""
    x, ids, _, up, _ = call.inputs
    a = up.shape[1]
    hidden: tuple[int, ...] = (2, a // 2) if call.argument("gated") else (a,)
    return x.factors, ((call.output(1).shape[0],), hidden), ((up.shape[0],),), ids.factors


def _backward_factors(call: Call) -> tuple[tuple[tuple[int, ...], ...], ...]:
    _, x, _, weights, up, down, *_ = call.inputs
    return x.factors, weights.factors, up.factors, down.factors


def _flops(call: Call, saved: Sequence[Any], up: Sequence[Any], down: Sequence[Any]) -> Any:
    """2 x rows x d x (f or 2 f, and f): as many rows as are saved."""
    f = down[2]
    first = 2 * f if call.argument("gated") else f
    return 2.0 * saved[0] * down[1] * (first + f)


def _forward_flops(call: Call, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    return _flops(call, outputs[1], inputs[3], inputs[4])


def _backward_flops(call: Call, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """Two products for each of the forward's."""
    return 2.0 * _flops(call, inputs[6], inputs[4], inputs[5])


def _moved(ids: Sequence[Any], down: Sequence[Any], dtype: torch.dtype, passes: int) -> Any:
    """Every row of this rank's tokens, also of those whose experts are elsewhere, in `passes` reads and writes."""
    return passes * prod(ids) * down[1] * dtype.itemsize


def _forward_moved(call: Call, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """Rows of tokens are picked (read, written), results written and summed up."""
    return _moved(inputs[1], inputs[4], call.tensor("up").dtype, 4)


def _backward_moved(call: Call, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """Rows of gradients and of tokens are picked, rows of gradients written and summed up."""
    return _moved(inputs[2], inputs[5], call.tensor("up").dtype, 6)


# ---- on one rank

@dataclass(frozen=True)
class _Routes:
    """Where the rows of this rank's tokens go. `counts` and `got`: by way, sent and received; without an axis to travel, the same.
    `room` for rows here, `balanced` of which an even load takes."""

    ctx: LocalContext
    axis: int | None
    ways: int
    order: Any
    token: Any
    counts: Any
    got: Any
    sent: int
    room: int
    balanced: int

    @staticmethod
    def of(ctx: LocalContext, ids: Any, x: int, up: int, balanced: int, order: Any = None) -> _Routes:
        """`x`, `up`: positions among the tensor inputs; `order`: as it is known already."""
        split = ctx.axes(ctx.inputs[up], 0)
        travel = [a for a in split if is_shard(ctx.inputs[x][a])]
        axis = travel[0] if travel else None
        ways, inner = ctx.ranks(travel), ctx.ranks([a for a in split if travel and a > travel[0]])
        where = (ctx.call.inputs[up].shape[0], ctx.ranks(split), ways, inner, ctx.index(split))
        tokens, k = ctx.local_in(x)[0], ctx.call.inputs[x + 1].shape[1]
        sent = tokens * k
        order = aten.reshape.default(SORT_ROWS(ids, *where) if order is None else order, [sent])
        counts = COUNT_ROWS(ids, *where)
        token = aten.div.Tensor_mode(order, k, rounding_mode="floor")
        if axis is None:
            return _Routes(ctx, axis, 1, order, token, counts, counts, sent, sent, balanced)
        room = min(ways * sent, max(ceil(ctx.call.argument("capacity") * balanced), FEWEST))
        return _Routes(ctx, axis, ways, order, token, counts, ctx.all_to_all(counts, axis), sent, room, balanced)

    def there(self, rows: Any) -> Any:
        """Sorted rows to the ranks of their experts."""
        return rows if self.axis is None else self.ctx.all_to_all_rows(rows, self.counts, self.got, self.room, self.balanced, self.axis)

    def back(self, rows: Any) -> Any:
        return rows if self.axis is None else self.ctx.all_to_all_rows(rows, self.got, self.counts, self.sent, self.balanced, self.axis)

    def rows_of(self, tokens: Any, have: torch.dtype, want: torch.dtype) -> Any:
        return self.there(aten.index_select.default(cast(tokens, have, want), 0, self.token))


def _forward(ctx: LocalContext, x: Any, ids: Any, weights: Any, up: Any, down: Any, activation: str, gated: bool, capacity: float) -> Any:
    metas = ctx.call.inputs
    kept = ctx.local_out(1)[0]
    routes = _Routes.of(ctx, ids, 0, 3, kept)
    rows = routes.rows_of(x, metas[0].dtype, metas[3].dtype)
    results, saved, held = RUN_ROWS(rows, routes.got, routes.ways, up, down, activation, gated, kept)
    k = metas[1].shape[1]
    out = COMBINE_ROWS(routes.back(results), routes.order, weights, k, metas[0].dtype)
    return out, saved, held, aten.view.default(routes.order, [routes.sent // k, k])


def _backward(ctx: LocalContext, grad: Any, x: Any, ids: Any, weights: Any, up: Any, down: Any, saved: Any, held: Any, order: Any,
              activation: str, gated: bool, capacity: float) -> Any:
    metas = ctx.call.inputs
    routes, k = _Routes.of(ctx, ids, 1, 4, ctx.local_in(6)[0], order), metas[2].shape[1]
    grads = routes.rows_of(grad, metas[0].dtype, metas[4].dtype)
    rows = routes.rows_of(x, metas[1].dtype, metas[4].dtype)
    by_row = routes.there(aten.index_select.default(aten.reshape.default(weights, [routes.sent]), 0, routes.order))
    grad_rows, grad_weights, grad_up, grad_down = RUN_ROWS_BACKWARD(grads, rows, by_row, routes.got, routes.ways, up, down, saved,
                                                                   activation, gated)
    return (COMBINE_ROWS(routes.back(grad_rows), routes.order, None, k, metas[1].dtype), PLACE_ROWS(routes.back(grad_weights), routes.order, k),
            grad_up, grad_down)


def _one_way(call: Call, specs: Sequence[Spec], sizes: tuple[int, ...]) -> bool:
    """Whether tokens travel along at most one mesh axis."""
    x, up = (specs[call.argument(name).index] for name in ("x", "up"))
    return len([a for a, b in zip(x, up, strict=True) if is_shard(a) and b == 0]) <= 1


RULES = {
    EXPERTS: Rule(_forward_rows, _forward_factors, _forward, flops=_forward_flops, moved=_forward_moved, family=Family.MATMUL, private=(1, 2, 3),
                  takes=_one_way),
    EXPERTS_BACKWARD: Rule(_backward_rows, _backward_factors, _backward, flops=_backward_flops, moved=_backward_moved, family=Family.MATMUL,
                           takes=_one_way),
}
