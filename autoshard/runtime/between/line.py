"""A value of a program at one size and at another, on the line through both."""
from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from fractions import Fraction
from typing import Any

import torch


class NoLine(Exception):
    """Two programs differ in more than their sizes, or a size between them gives a part of a number."""


@dataclass(frozen=True)
class Line:
    """Through the sizes `first` and `second`, at `size`. Two numbers a + b n that are equal at both ends are equal between, and one that is
    less than another at both ends is so between: what was decided by comparing them is decided alike."""

    first: int
    second: int
    size: int

    def __call__(self, a: Any, b: Any) -> Any:
        """What is `a` at the first size and `b` at the second. Raises NoLine where that is no line, or no whole number here."""
        if a is b:
            return b
        if type(a) is not type(b):
            raise NoLine(f"{a!r:.80} is {b!r:.80} at the other size")
        if type(a) is int:
            return self._number(a, b)
        if isinstance(a, (tuple, list)) and len(a) == len(b):
            return self._items(a, b)
        if is_dataclass(a):
            return type(b)(**{f.name: self(getattr(a, f.name), getattr(b, f.name)) for f in fields(a) if f.init})
        if isinstance(a, torch.Tensor) and a.shape == b.shape and torch.equal(a, b) or not isinstance(a, torch.Tensor) and a == b:
            return b
        raise NoLine(f"{a!r:.80} is {b!r:.80} at the other size")

    def _number(self, a: int, b: int) -> int:
        value = a + (b - a) * self.share
        if value.denominator != 1:
            raise NoLine(f"between {a} and {b} there is {value} at size {self.size}")
        return value.numerator

    def _items(self, a: Any, b: Any) -> Any:
        items = [self(x, y) for x, y in zip(a, b, strict=True)]
        if hasattr(b, "_fields"):  # a named tuple
            return type(b)(*items)
        return type(b)(items)

    def fraction(self, a: float, b: float) -> float:
        """Of a measure that need not be whole."""
        return a + (b - a) * float(self.share)

    @property
    def share(self) -> Fraction:
        """How far between the ends the size is."""
        return Fraction(self.size - self.first, self.second - self.first)
