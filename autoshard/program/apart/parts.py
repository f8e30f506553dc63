"""What is known of a value that is a concatenation, and how reshapes and turns move the dim along which it is one."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from autoshard.base.graph import Op, Ref

aten = torch.ops.aten
RESHAPES = (aten.view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims)
TURNS = (aten.t.default, aten.transpose.int, aten.permute.default)
Lengths = tuple[int, ...]


@dataclass(frozen=True)
class Parts:
    """A value as the concatenation of `refs`, of `lengths`, along `dim`; None: zeros."""

    dim: int
    lengths: Lengths
    refs: tuple[Ref | None, ...]


def starts_of(lengths: Lengths) -> Lengths:
    return tuple(sum(lengths[:i]) for i in range(len(lengths)))


def reshaped(before: Sequence[int], dim: int, after: Sequence[int], lengths: Lengths) -> tuple[int, Lengths] | None:
    """Dim and lengths of a concatenation behind a reshape; None where a part is no range of one dim any more."""
    lead, inner = prod(before[:dim]), prod(before[dim + 1:])
    for d, n in enumerate(after):
        grain = prod(after[d + 1:])
        if n > 1 and prod(after[:d]) == lead and n * grain == before[dim] * inner and all(length * inner % grain == 0 for length in lengths):
            return d, tuple(length * inner // grain for length in lengths)
    return None


def turned(op: Op, dim: int, rank: int) -> int:
    """Where a transposition or permutation puts a dim."""
    if op.target is aten.permute.default:
        return [d % rank for d in op.args[1]].index(dim)
    a, b = (0, 1) if op.target is aten.t.default else (d % rank for d in op.args[1:])
    return {a: b, b: a}.get(dim, dim)


def ranges(reader: Op, shape: Sequence[int], dim: int) -> list[tuple[int, int]] | None:
    """What a split or slice along `dim` takes, as (start, length) of each of its outputs; None for another op."""
    if reader.target in (aten.split_with_sizes.default, aten.split.Tensor):
        if (reader.args[2] if len(reader.args) > 2 else dict(reader.kwargs).get("dim", 0)) % len(shape) != dim:
            return None
        lengths = tuple(m.shape[dim] for m in reader.outputs if m is not None)
        return list(zip(starts_of(lengths), lengths, strict=True))
    if reader.target is aten.slice.Tensor:
        return _slice(reader, shape, dim)
    return None


def _slice(reader: Op, shape: Sequence[int], dim: int) -> list[tuple[int, int]] | None:
    _, d, start, _, step = (*reader.args, *(0, None, None, 1)[len(reader.args) - 1:])
    if d % len(shape) != dim or step != 1 or reader.kwargs or reader.outputs[0] is None:
        return None
    n = shape[dim]
    first = min(max(start + n if (start or 0) < 0 else start or 0, 0), n)
    return [(first, reader.outputs[0].shape[dim])]
