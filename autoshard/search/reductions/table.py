"""The costs of the pairs of two nodes' strategies."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import numpy as np

V = TypeVar("V")


class Kinds(NamedTuple):
    """A table of the kinds of strategies that it tells apart: the pair (s, t) costs `table[rows[s], cols[t]]`."""

    table: np.ndarray
    rows: np.ndarray
    cols: np.ndarray


class Table:
    """An immutable matrix of pair costs `a` (rows: this node's strategies) with its transpose `T`.

    Facts about it are computed once and kept: see `fact`. A table holds its transpose, which only knows of it, so that both are gone as soon as
    nobody holds them: a large search waited seconds for the garbage collector. One of `kinds` is dense once somebody reads `a`, and before takes
    next to no memory: on four mesh axes an edge between two ops has a million pairs."""

    __slots__ = ("__weakref__", "_dense", "_other", "facts", "kinds")

    def __init__(self, a: np.ndarray | None, transpose: Table | None = None, kinds: Kinds | None = None) -> None:
        self._dense, self.kinds = a, kinds
        self.facts: dict[Callable[[np.ndarray], object], Any] = {}
        self._other: Table | ref[Table] | None = None if transpose is None else ref(transpose)
        if a is not None and transpose is None:
            self._other = Table(np.ascontiguousarray(a.T), self)

    @property
    def a(self) -> np.ndarray:
        if self._dense is None:
            assert self.kinds is not None, "a table is dense or of kinds"
            table, rows, cols = self.kinds
            self._dense = table[rows[:, None], cols[None, :]]
        return self._dense

    @property
    def shape(self) -> tuple[int, int]:
        if self._dense is None:
            assert self.kinds is not None, "a table is dense or of kinds"
            return len(self.kinds.rows), len(self.kinds.cols)
        return self._dense.shape[0], self._dense.shape[1]

    @property
    def size(self) -> int:
        rows, cols = self.shape
        return rows * cols

    @property
    def T(self) -> Table:  # noqa: N802 (as numpy's)
        if isinstance(self._other, Table):
            return self._other
        known = self._other() if self._other is not None else None
        if known is None:
            first = self._other is None
            known = self._transposed()
            known._other = ref(self) if first else self
            self._other = known if first else ref(known)
        return known

    def _transposed(self) -> Table:
        other = Table.__new__(Table)
        other._dense = None if self._dense is None else np.ascontiguousarray(self._dense.T)
        other.kinds = None if self.kinds is None else Kinds(self.kinds.table.T, self.kinds.cols, self.kinds.rows)
        other.facts = {}
        return other

    def take(self, kept: np.ndarray) -> Table:
        """The rows `kept`."""
        if self._dense is None and self.kinds is not None:
            return Table(None, kinds=self.kinds._replace(rows=self.kinds.rows[kept]))
        return Table(self.a[kept])

    def fact(self, compute: Callable[[np.ndarray], V]) -> V:
        try:
            known: V = self.facts[compute]
            return known
        except KeyError:
            found = self.facts[compute] = compute(self.a)
            return found
