"""Seconds as a function of an amount (bytes on the wire, bytes moved, FLOP), through measured points."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.base.typed_data import Number

Points = tuple[tuple[Number, Number], ...]
"""(amount, seconds) pairs."""


@dataclass(frozen=True)
class Curve:
    """Straight lines between the points; constant below the first; the last line goes on above the last.

    amounts  strictly increasing;  seconds  positive and never falling, so that the curve is monotone
    per_byte  FLOP that a byte counts for, of a curve over FLOP: its amounts are FLOP + per_byte x bytes. Convolutions of small images read and
              rearrange many weights for few FLOP

    >>> Curve((0.0, 1e6), (1e-4, 1.1e-3))(np.array([5e5, 2e6]))     # 0.1 ms and 1 ns per byte
    array([0.0006, 0.0021])
    """

    amounts: tuple[float, ...]
    seconds: tuple[float, ...]
    per_byte: float = 0.0

    def __call__(self, amount: Any) -> Any:
        (a, b), (s, t) = self.amounts[-2:], self.seconds[-2:]
        beyond = np.maximum(np.asarray(amount, np.float64) - b, 0.0) * ((t - s) / (b - a))
        return np.interp(amount, self.amounts, self.seconds) + beyond

    @property
    def points(self) -> Points:
        """As a profile writes it."""
        return tuple(zip(self.amounts, self.seconds, strict=True))

    @staticmethod
    def through(points: Points, per_byte: float = 0.0) -> "Curve":
        """The inverse of `points`."""
        amounts, seconds = zip(*points, strict=True)
        return Curve(amounts, seconds, per_byte)


def problem(points: Points) -> str:
    """What is wrong with the points of a curve as they stand in a profile; empty when nothing is."""
    if len(points) < 2:
        return "a list of at least two [amount, seconds] pairs of numbers is needed"
    amounts, seconds = zip(*points, strict=True)
    if amounts[0] < 0 or any(b <= a for a, b in zip(amounts, amounts[1:], strict=False)):
        return "amounts must not be negative and must increase"
    if seconds[0] <= 0 or any(t < s for s, t in zip(seconds, seconds[1:], strict=False)):
        return "seconds must be positive and must not fall"
    return ""
