"""A mesh on which an axis of the user's is several: tp=8 as 4 times 2, over the same ranks.

A dim that divides by a factor of an axis only (4 kv heads on 8 ranks) is split over a part of it. Parts come in place of their axis, major first, so
what all of them split together lies as the axis would have it. They go by what they are, in terms of a rank's coordinate on the axis:

    tp=8 as 4 x 2        tp//2  4 parts of two ranks that follow each other        tp%2  2, the place within such a pair
    tp=8 as 2 x 2 x 2    tp//4, tp//2%2, tp%2

All parts of an axis taken as one go by the name of the axis. Only values inside of a program lie so: what users hold or pass has placements on
their mesh (`Mesh.as_whole`)."""
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from autoshard.base.mesh import Mesh
from autoshard.errors import MeshError

Parts = Mapping[str, tuple[int, ...]]
"""Sizes of the parts, major first, by the name of the axis."""
NEVER, AUTO = "never", "auto"


@dataclass(frozen=True)
class FineMesh(Mesh):
    """`given`: the user's mesh. Made by `refined`."""

    given: Mesh
    parts: tuple[tuple[str, tuple[int, ...]], ...]

    def __post_init__(self) -> None:
        """Names of parts are no identifiers; sizes are checked by `refined`."""

    @property
    def whole(self) -> Mesh:
        return self.given

    @property
    def finer(self) -> dict[str, tuple[int, ...]]:
        return dict(self.parts)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        return tuple(a for a, name in enumerate(self.given.names) for _ in self.finer.get(name, (0,)))

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.given.names, *self.names)))

    def named(self, name: str) -> tuple[int, ...]:
        if name in self.names:
            return (self.names.index(name),)
        owner = self.given.index(name) if name in self.given.names else None
        if owner is None:
            raise MeshError(f"no mesh axis {name!r}; the axes are {', '.join(self.words)}")
        return tuple(i for i, a in enumerate(self.owners) if a == owner)

    def shown(self, axes: Sequence[int]) -> tuple[str, ...]:
        out, at = [], 0
        while at < len(axes):
            name = self.given.names[self.owners[axes[at]]]
            every = self.named(name)
            joined = tuple(axes[at:at + len(every)]) == every
            out.append(name if joined else self.names[axes[at]])
            at += len(every) if joined else 1
        return tuple(out)

    def __str__(self) -> str:
        finer = self.finer
        return ",".join(f"{n}={'x'.join(map(str, finer.get(n, (s,))))}" for n, s in zip(self.given.names, self.given.sizes, strict=True))


def refined(mesh: Mesh, parts: Parts) -> Mesh:
    """`mesh` with axes in parts; `mesh` itself without any. Raises MeshError for an axis it lacks and for parts that do not multiply to theirs."""
    if not parts:
        return mesh
    names: list[str] = []
    sizes: list[int] = []
    for axis, size in zip(mesh.names, mesh.sizes, strict=True):
        mine = tuple(parts.get(axis, (size,)))
        if prod(mine) != size or axis in parts and (len(mine) < 2 or min(mine) < 2):
            raise MeshError(f"mesh axis {axis}={size} in parts {'x'.join(map(str, mine))}: parts are two or more numbers of at least 2 that multiply "
                            f"to {size}, such as {axis}={_example(size)}")
        names += _names(axis, mine) if len(mine) > 1 else [axis]
        sizes += mine
    for axis in parts:
        mesh.index(axis)
    return FineMesh(tuple(names), tuple(sizes), mesh, tuple((axis, tuple(parts[axis])) for axis in mesh.names if axis in parts))


def _names(axis: str, parts: Sequence[int]) -> list[str]:
    """Of the parts, major first."""
    out = []
    for i, size in enumerate(parts):
        below = prod(parts[i + 1:])
        out.append(f"{axis}{f'//{below}' if below > 1 else ''}{f'%{size}' if i else ''}")
    return out


def _example(size: int) -> str:
    factor = next((k for k in range(2, size) if size % k == 0), None)
    return f"{size // factor}x{factor}" if factor else f"... ({size} has no factors)"


def parse_parts(text: str) -> Parts:
    """`"tp=4x2,dp=2x2"` to the parts by axis; none for "never" and "auto". Raises MeshError."""
    if text in (NEVER, AUTO):
        return {}
    out: dict[str, tuple[int, ...]] = {}
    for entry in text.split(","):
        found = re.fullmatch(r"\s*([A-Za-z_]\w*)=(\d+(?:x\d+)+)\s*", entry)
        if not found or found[1] in out:
            raise MeshError(f"cannot read the finer axes {text!r} at {entry!r}; write auto, never, or the parts of each axis once, as tp=4x2")
        out[found[1]] = tuple(map(int, found[2].split("x")))
    return out
