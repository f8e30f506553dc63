"""The program of a micro-batch of any number of rows, from those of two numbers.

Everything that differs between two sizes of a batch is a number: dims of tensors, and arguments that say them. All are of the form c + d * rows
where micro-batches are exact, so two traces give the third. It is for prices; what runs is traced.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from autoshard.base.graph import Graph, Op, TensorMeta
from autoshard.errors import AutoshardError


class Unlike(AutoshardError):
    """Two programs differ by more than numbers."""


@dataclass(frozen=True)
class Between:
    """`place`: 0 at the first program's rows, 1 at the second's."""

    place: Fraction

    @staticmethod
    def of(rows: int, first: int, second: int) -> Between:
        return Between(Fraction(rows - first, second - first))

    def graph(self, first: Graph, second: Graph, microbatches: int) -> Graph:
        """The program that a step runs so often. Raises Unlike."""
        if len(first.ops) != len(second.ops):
            raise Unlike(f"the program has {len(first.ops)} ops at one size of a batch and {len(second.ops)} at another")
        return replace(first, ops=tuple(self._op(a, b) for a, b in zip(first.ops, second.ops)), microbatches=microbatches)

    def _op(self, a: Op, b: Op) -> Op:
        if (a.name, a.kind, a.target, a.phase) != (b.name, b.kind, b.target, b.phase):
            raise Unlike(f"{a.where} of one size of a batch is {b.where} of another")
        return replace(a, args=self._value(a.args, b.args, a), kwargs=self._value(a.kwargs, b.kwargs, a),
                       outputs=tuple(self._meta(m, n, a) for m, n in zip(a.outputs, b.outputs, strict=True)))

    def _meta(self, m: TensorMeta | None, n: TensorMeta | None, op: Op) -> TensorMeta | None:
        if m is None or n is None or m == n:
            return m
        return TensorMeta(self._value(m.shape, n.shape, op), m.dtype, self._value(m.factors, n.factors, op))

    def _value(self, a: Any, b: Any, op: Op) -> Any:
        if a == b:
            return a
        if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
            return tuple(self._value(x, y, op) for x, y in zip(a, b))
        if isinstance(a, float) and isinstance(b, float):
            return a + float(self.place) * (b - a)
        found = a + self.place * (b - a) if isinstance(a, int) and isinstance(b, int) else None
        if found is None or found.denominator != 1 or found < 1:
            raise Unlike(f"{op.where}: {a} at one size of a batch and {b} at another")
        return int(found)


@dataclass(frozen=True)
class Line(Between):
    """For programs that must be those of a trace: numbers are whole, grow with the rows, and are no less than nothing at none. So squares of
    rows, their inverses and roots are no numbers of this kind. `first`, `second`: rows of the two programs."""

    first: int
    second: int

    def _value(self, a: Any, b: Any, op: Op) -> Any:
        if a == b or isinstance(a, tuple):
            return super()._value(a, b, op)
        if not all(type(x) in (int, float) and x == int(x) for x in (a, b)) or type(a) is not type(b):
            raise Unlike(f"{op.where}: {a} at one size of a batch and {b} at another")
        slope = Fraction(int(b) - int(a), self.second - self.first)
        if slope < 0 or int(a) - slope * self.first < 0:
            raise Unlike(f"{op.where}: {a} at {self.first} rows of a batch and {b} at {self.second}")
        return type(a)(super()._value(int(a), int(b), op))
