"""Where the rows of a mask are: `torch.where(mask)`, `mask.nonzero()`, and indexing by them and by rows of other tensors."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from autoshard.program.reads.rows import Selection, named

FINDS = named("nonzero argwhere where", Tensor, torch)
FLATTENS = named("flatten view reshape squeeze", Tensor, torch)
READS, WRITES = Tensor.__getitem__, Tensor.__setitem__
ADDS = named("index_add index_add_", Tensor, torch)


def as_index(func: Any, args: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """`x.index_select(0, rows)` as `x[rows]`."""
    selects = func in (Tensor.index_select, torch.index_select) and len(args) == 3 and args[1] == 0 and isinstance(args[2], Selection)
    return (READS, (args[0], args[2])) if selects else (func, args)


def column_of(func: Any, x: Selection, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Selection | None:
    """Of rows of one number a list of these, and of `mask.nonzero()` a column."""
    if func is READS and x.found and x.dims_of() == 1:
        of_row = args[0][1:] if isinstance(args[0], tuple) and args[0][:1] == (slice(None),) else ()
        return x.where(x.found[of_row[0]]) if len(of_row) == 1 and type(of_row[0]) is int else None
    if func not in FLATTENS or kwargs or x.everywhere.shape.numel() != x.left_out.numel():
        return None
    if args not in ((), (-1,), ((-1,),)) if func.__name__ != "squeeze" else args not in ((1,), (-1,)) or x.dims_of() != 1:
        return None
    return x.where(*x.found) if x.found else x.of_same(x.everywhere.reshape(x.left_out.shape))


def list_of(index: Any) -> tuple[tuple[Selection, ...], tuple[Any, ...]]:
    """What indexes the first dims, of which rows say one place each, and what indexes each row."""
    parts = index if isinstance(index, tuple) else (index,)
    lists = tuple(takewhile(lambda p: isinstance(p, Selection) and not p.dims_of() and p.everywhere.dtype is torch.long, parts))
    return lists, parts[len(lists):]


def _dims(x: Tensor, lists: Sequence[Selection]) -> tuple[int, ...]:
    """The dims of a mask in whose order the first dims of `x` lie, where `lists` are columns of it."""
    dims = tuple(d for p in lists for d in p.found)
    is_whole = len(dims) == len(set(dims)) == len(lists) and tuple(lists[0].left_out.shape[d] for d in dims) == x.shape[:len(dims)]
    return dims if is_whole else ()


def gathered(x: Tensor, lists: Sequence[Selection]) -> Selection:
    """`table[ids[mask]]`, and `x[rows]` by some columns of a mask."""
    mask, dims = lists[0].left_out.shape, _dims(x, lists)
    if dims:
        rest = x.shape[len(dims):]
        ordered = x.permute(*sorted(range(len(dims)), key=dims.__getitem__), *range(len(dims), x.ndim))
        everywhere = ordered.reshape(*(n if d in dims else 1 for d, n in enumerate(mask)), *rest).expand(*mask, *rest)
    else:
        everywhere = x[_at(x, lists)]
    return Selection.of(everywhere, lists[0].left_out, lists[0].key, lists[0].line, is_new=True)


def _at(x: Tensor, lists: Sequence[Selection]) -> tuple[Tensor, ...]:
    """An index for all rows: of columns of the mask all places, where `x` has these."""
    fits = (p.found and p.left_out.shape[p.found[0]] <= n for p, n in zip(lists, x.shape, strict=False))
    return tuple(p.places_in(*p.found) if fit else p.everywhere for p, fit in zip(lists, fits, strict=True))


def put(x: Tensor, lists: Sequence[Selection], value: Any) -> Any:
    """`x[rows] = value`, and `x[rows, ids[rows]] = value`, where no place comes twice."""
    first, row = lists[0], x.shape[len(lists):]
    if isinstance(value, (int, float)):
        value = torch.full((), value, dtype=x.dtype, device=x.device)
    if not isinstance(value, Selection):
        if value.ndim > len(row):
            return NotImplemented
        value = first.of_same(value.expand(*first.left_out.shape, *row))
    if value.everywhere.shape[first.left_out.ndim:] != row:
        return NotImplemented
    if dims := _dims(x, lists):
        return _put_last(x, dims, value)
    if not first.found or first.left_out.shape != x.shape[:1]:
        return NotImplemented
    places = _at(x, lists)
    before = x[places]
    x.index_put_(places, torch.where(first.places(before), before, value.everywhere.to(x.dtype)))
    return None


def _put_last(x: Tensor, dims: Sequence[int], value: Selection) -> None:
    """Of the rows with one place the last one is written, where torch does not say which."""
    rows, chosen = _side_by_side(value, dims, value.everywhere), _side_by_side(value, dims, ~value.left_out)
    last = (chosen * torch.arange(1, chosen.shape[-1] + 1, device=chosen.device)).argmax(-1, keepdim=True)
    wide = (1,) * (x.ndim - len(dims))
    row = _Last.apply(rows, last.view(*last.shape, *wide).expand(*last.shape, *x.shape[len(dims):]), len(dims)).squeeze(len(dims))
    x.copy_(torch.where(chosen.any(-1).view(*last.shape[:-1], *wide), row.to(x.dtype), x))


class _Last(torch.autograd.Function):
    """The row that stays. All rows that are written to its place get its gradient, as in torch."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, last: Tensor, dim: int) -> Tensor:
        ctx.shape = rows.shape
        return rows.gather(dim, last)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad.expand(ctx.shape), None, None


def added(x: Tensor, dim: Any, rows: Any, value: Any) -> Any:
    """`x.index_add(0, rows, value)`."""
    lists, rest = list_of(rows)
    if dim != 0 or len(lists) != 1 or rest or not isinstance(value, Selection) or value.everywhere.shape[value.left_out.ndim:] != x.shape[1:]:
        return NotImplemented
    given = value.filled(value.everywhere, 0)
    if dims := _dims(x, lists):
        return x + _side_by_side(value, dims, given).sum(1, dtype=x.dtype)
    return x.index_add(0, lists[0].everywhere.flatten(), given.flatten(0, value.left_out.ndim - 1))


def _side_by_side(rows: Selection, dims: Sequence[int], x: Tensor) -> Tensor:
    """With what lies in other dims of the mask than these in one dim behind them."""
    n = rows.left_out.ndim
    ordered = x.permute(*dims, *(d for d in range(n) if d not in dims), *range(n, x.ndim))
    return ordered.reshape(*ordered.shape[:len(dims)], -1, *x.shape[n:])
