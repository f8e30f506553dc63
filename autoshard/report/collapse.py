"""Names of repeated layers folded into one: `layers.0.attn`, ..., `layers.31.attn` -> `layers.*.attn`.

Only rows that say the same are folded. Where layer 31 differs, the rest reads `layers.{0-30}.attn`.
"""
from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Folded:
    """Rows with equal `payload` whose names agree up to the indices of repeated layers. `rows`: which of those given."""

    parts: tuple[str, ...]
    payload: Hashable
    rows: tuple[int, ...] = (0,)

    @property
    def copies(self) -> int:
        return len(self.rows)

    @property
    def name(self) -> str:
        return ".".join(self.parts)

    @property
    def section(self) -> str:
        """The repeated layer this belongs to (`layers.*`), or "" outside of repeated layers."""
        for i, part in enumerate(self.parts):
            nested = len(self.parts) - i > 2
            if (is_folded(part) and i > 0) or ((is_folded(part) or part.isdigit()) and nested):
                return ".".join(self.parts[:i + 1])
        return ""


def is_folded(part: str) -> bool:
    return part == "*" or part.startswith("{")


def collapse(rows: Iterable[tuple[str, Hashable]]) -> tuple[Folded, ...]:
    """Fold (dotted name, payload) rows; order is that of the first member of each fold."""
    folded = tuple(Folded(tuple(name.split(".")), payload, (i,)) for i, (name, payload) in enumerate(rows))
    depth = max((len(f.parts) for f in folded), default=0)
    for position in range(depth):
        folded = _fold_at(folded, position)
    return folded


def _fold_at(rows: tuple[Folded, ...], position: int) -> tuple[Folded, ...]:
    """Fold rows that differ only in the number at `position`."""
    siblings: dict[Hashable, set[int]] = {}
    members: dict[Hashable, list[Folded]] = {}
    for row in rows:
        around = _around(row, position)
        if around is not None:
            siblings.setdefault(around, set()).add(int(row.parts[position]))
        key = (around, row.payload) if around is not None else (row.parts, row.payload)
        members.setdefault(key, []).append(row)
    return tuple(_merge(group, siblings.get(_around(group[0], position), set()), position)
                 for group in members.values())


def _around(row: Folded, position: int) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    if position >= len(row.parts) or not row.parts[position].isdigit():
        return None
    return row.parts[:position], row.parts[position + 1:]


def _merge(group: list[Folded], siblings: set[int], position: int) -> Folded:
    first, rows = group[0], tuple(i for row in group for i in row.rows)
    if not siblings:
        return replace(first, rows=rows)
    found = {int(row.parts[position]) for row in group}
    if len(found) == 1:
        label = first.parts[position]
    else:
        label = "*" if found == siblings else "{" + ranges(found) + "}"
    return replace(first, parts=(*first.parts[:position], label, *first.parts[position + 1:]), rows=rows)


def ranges(numbers: Iterable[int]) -> str:
    """`{0, 1, 2, 5}` -> `"0-2,5"`."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
