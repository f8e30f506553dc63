"""Reads tables of a cluster profile: every value is checked, and a message names where it stands."""
from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from math import isfinite
from typing import Any

from autoshard.cost.curve import Curve, problem
from autoshard.errors import ClusterError


class Reader:
    """One table of a profile; knows its path for messages and refuses keys nobody asked for."""

    def __init__(self, data: Any, origin: str, path: str):
        if not isinstance(data, Mapping):
            raise ClusterError(f"{origin}: {path or 'the profile'} is {data!r}, a table is needed")
        self.data, self.origin, self.path, self.seen = data, origin, path, set()

    def where(self, key: str) -> str:
        return f"{self.origin}: {self.path}.{key}" if self.path else f"{self.origin}: {key}"

    def keys(self) -> set[str]:
        return set(self.data)

    def take(self, key: str, kind: type, default: Any = None) -> Any:
        self.seen.add(key)
        value = self.data.get(key, default)
        if value is None:
            raise ClusterError(f"{self.where(key)} is missing")
        if not isinstance(value, kind):
            raise ClusterError(f"{self.where(key)} is {value!r}, a {kind.__name__} is needed")
        return value

    def table(self, key: str) -> "Reader":
        return Reader(self.take(key, Mapping), self.origin, f"{self.path}.{key}".lstrip("."))

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number."""
        if key not in self.data and default is not None:
            self.seen.add(key)
            return default
        value = self.take(key, object)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value) or value <= 0:
            raise ClusterError(f"{self.where(key)} is {value!r}; a positive number is needed")
        return float(value)

    def numbers(self, key: str, kind: type) -> Any:
        """A table whose keys are the fields of dataclass `kind`, all positive numbers, as one; None where there is none."""
        if self.take(key, object, False) is False:
            return None
        inner = self.table(key)
        out = kind(*(inner.number(f.name) for f in fields(kind)))
        inner.finish()
        return out

    def curves(self, key: str, names: tuple[str, ...] = ()) -> tuple[tuple[str, Curve], ...]:
        """A table of measured curves; an absent one is empty. `names`: what may be in it, anything if not given."""
        if key not in self.data:
            self.seen.add(key)
            return ()
        inner = self.table(key)
        out = tuple((k, inner.curve(k)) for k in sorted(inner.keys() & set(names) if names else inner.keys()))
        inner.seen |= set(names)
        inner.finish()
        return out

    def curve(self, key: str) -> Curve:
        points = self.take(key, object)
        if what := problem(points):
            raise ClusterError(f"{self.where(key)}: {what}")
        return Curve(tuple(float(a) for a, _ in points), tuple(float(s) for _, s in points))

    def fraction(self, key: str, above_zero: bool = False) -> float:
        value = self.take(key, object)
        ok = not isinstance(value, bool) and isinstance(value, (int, float)) and 0 <= value <= 1
        if not ok or (above_zero and value == 0):
            raise ClusterError(f"{self.where(key)} is {value!r}; a fraction between 0 and 1 is needed")
        return float(value)

    def finish(self) -> None:
        extra = sorted(self.keys() - self.seen)
        if extra:
            near = difflib.get_close_matches(extra[0], self.seen, n=1)
            hint = f"; did you mean {near[0]}?" if near else "; remove it"
            raise ClusterError(f"{self.where(extra[0])} is not a key of a profile{hint}")
