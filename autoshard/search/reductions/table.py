"""The costs of the pairs of two nodes' strategies."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import ref

import numpy as np

V = TypeVar("V")


class Table:
    """An immutable matrix of pair costs (rows: this node's strategies) with its transpose `T`.

    Facts about it are computed once and kept: see `fact`. A table holds its transpose, which only knows of it, so that both are gone as soon as
    nobody holds them: a large search waited seconds for the garbage collector."""

    __slots__ = ("__weakref__", "_other", "a", "facts")

    def __init__(self, a: np.ndarray, transpose: Table | None = None) -> None:
        self.a = a
        self.facts: dict[Callable[[np.ndarray], object], Any] = {}
        self._other: Table | ref[Table] = ref(transpose) if transpose is not None else Table(np.ascontiguousarray(a.T), self)

    @property
    def T(self) -> Table:  # noqa: N802 (as numpy's)
        if isinstance(self._other, Table):
            return self._other
        known = self._other()
        if known is None:
            known = Table.__new__(Table)
            known.a, known.facts, known._other = np.ascontiguousarray(self.a.T), {}, self
            self._other = ref(known)
        return known

    def fact(self, compute: Callable[[np.ndarray], V]) -> V:
        try:
            known: V = self.facts[compute]
            return known
        except KeyError:
            found = self.facts[compute] = compute(self.a)
            return found
