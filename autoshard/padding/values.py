"""What is known of the pad of a value: how long its dims truly are, and what is behind that."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite

import torch

from autoshard.base.graph import Ref

FINITE, BESIDE, ANY = "finite", "finite beside pads", "any"
Fill = float | str
"""What is in the pad along a dim, for every position along the other dims: a number, `FINITE` (numbers, no infinity and no NaN, where the
true values have none), `BESIDE` (numbers where the other dims have true positions, and anything in their pads: rows of logits whose classes end in
-inf), or `ANY`."""
LOWEST = float("-inf")
Source = tuple[str, int]
"""A dim of a parameter that is padded."""


def next_multiple(n: int, size: int, waste: float) -> int | None:
    """The length from `n` on that `size` divides; None where the pad would be more than the part `waste` of `n`."""
    length = size * -(-n // size)
    return length if length - n <= waste * n else None


@dataclass(frozen=True)
class Pad:
    """Along one dim: its true length and the one it has, what is behind the true one, and which dims of parameters it comes from."""

    true: int
    length: int
    fill: Fill
    sources: frozenset[Source] = frozenset()

    def filled(self, fill: Fill) -> Pad:
        return replace(self, fill=fill)


@dataclass(frozen=True, eq=False)
class Value:
    """A value of the new graph that stands for one of the old: `shape` has the padded sizes."""

    ref: Ref
    shape: tuple[int, ...]
    dtype: torch.dtype
    pads: Mapping[int, Pad] = field(default_factory=dict)

    @property
    def is_finite(self) -> bool:
        """Whether no pad has infinities or NaNs."""
        return all(is_finite(pad.fill) for pad in self.pads.values())


def is_finite(fill: Fill) -> bool:
    return fill == FINITE if isinstance(fill, str) else isfinite(fill)


def joint(*fills: Fill) -> Fill:
    """What is known of numbers from any of these."""
    if len(set(fills)) == 1:
        return fills[0]
    return FINITE if all(map(is_finite, fills)) else ANY


def merged(*pads: Pad) -> Pad:
    """The pad of one dim as several operands have it, filled by any of them."""
    return Pad(pads[0].true, pads[0].length, joint(*(p.fill for p in pads)), frozenset().union(*(p.sources for p in pads)))
