"""Writes of rows into a table that is split along the dim of the rows: every rank writes those that land in its part.

All ranks write as many rows, into the table itself and without a spare row, so that the write may be done in place. What lands
elsewhere is replaced by a row that lands here (written twice with one value), or where none does by one that is there already.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autoshard.rules.parts import local_ids
from autoshard.rules.types import LocalContext

aten = torch.ops.aten


def write_rows(ctx: LocalContext, x: Any, dim: int, ids: Any, rows: Any, axes: Sequence[int]) -> Any:
    """`x`, this rank's part of a table split along `dim` over `axes`, with row i of `rows` at ids[i], a position in the whole table."""
    shape = ctx.local_in(0)
    if _writes_nothing(ctx):
        return aten.index_copy.default(x, dim, ids, rows)
    local, mine = local_ids(ctx, ids, axes, shape[dim], ctx.call.inputs[0].true_shape[dim])
    one = _first(mine, 0)
    there = aten.index_select.default(local, 0, one)
    spare = aten.where.self(aten.view.default(aten.index_select.default(mine, 0, one), [1] * len(shape)),
                            aten.index_select.default(rows, dim, one), aten.index_select.default(x, dim, there))
    rows = aten.where.self(aten.view.default(mine, [-1 if d == dim else 1 for d in range(len(shape))]), rows, spare)
    return aten.index_copy.default(x, dim, _positions(local, mine, there, shape[dim]), rows)


def write_elements(ctx: LocalContext, x: Any, dim: int, ids: Any, values: Any, axes: Sequence[int]) -> Any:
    """The same with positions along `dim` for every element, as in a scatter."""
    if _writes_nothing(ctx):
        return aten.scatter.src(x, dim, ids, values)
    size = ctx.local_in(0)[dim]
    local, mine = local_ids(ctx, ids, axes, size, ctx.call.inputs[0].true_shape[dim])
    one = _first(mine, dim)
    there = aten.gather.default(local, dim, one)
    spare = aten.where.self(aten.gather.default(mine, dim, one), aten.gather.default(values, dim, one), aten.gather.default(x, dim, there))
    return aten.scatter.src(x, dim, _positions(local, mine, there, size), aten.where.self(mine, values, spare))


def _positions(local: Any, mine: Any, there: Any, size: int) -> Any:
    """Where each row goes: this rank's as they are, those of others `there`. Those outside of the table stay outside, and are refused."""
    return aten.where.self(aten.bitwise_or.Tensor(mine, aten.ge.Scalar(local, size)), local, there)


def _writes_nothing(ctx: LocalContext) -> bool:
    """Whether there are no positions, and so no first one."""
    return 0 in ctx.call.inputs[1].shape


def _first(mine: Any, dim: int) -> Any:
    """Along `dim` (kept), a position where `mine` is True, any one where it is nowhere."""
    return aten.argmax.default(aten._to_copy.default(mine, dtype=torch.int32), dim, True)
