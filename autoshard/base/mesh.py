"""The device mesh as the planner sees it: named axes with sizes, no devices and no process group."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from autoshard.errors import MeshError

MOST_RANKS = 2**24
"""More than any machine has; sizes of tensors times ranks stay exact in 64 bits."""


@dataclass(frozen=True)
class Mesh:
    """Named mesh axes, major first: rank = sum of coordinate * product of the sizes that follow."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes) or not self.names:
            raise MeshError(f"mesh needs one size per axis, got names {self.names} and sizes {self.sizes}")
        for name, size in zip(self.names, self.sizes, strict=True):
            if not str(name).isidentifier():
                raise MeshError(f"mesh axis name {name!r} is not an identifier; write for example dp=2,tp=4")
            if not isinstance(size, int) or size < 1:
                raise MeshError(f"mesh axis {name!r} has size {size!r}; sizes are integers of at least 1")
        twice = sorted({n for n in self.names if self.names.count(n) > 1})
        if twice:
            raise MeshError(f"mesh axis {twice[0]!r} is named twice; give every axis its own name")
        if self.size > MOST_RANKS:
            raise MeshError(f"mesh {self} has {self.size} ranks; the most is {MOST_RANKS}")

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    @property
    def size(self) -> int:
        return prod(self.sizes)

    def index(self, axis: str) -> int:
        if axis not in self.names:
            raise MeshError(f"no mesh axis {axis!r}; the axes are {', '.join(self.names)}")
        return self.names.index(axis)

    @property
    def whole(self) -> Mesh:
        """The mesh as the user wrote it: this one, but for a `FineMesh`."""
        return self

    @property
    def finer(self) -> dict[str, tuple[int, ...]]:
        """Axes of `whole` that are several here, with the sizes of their parts."""
        return {}

    @property
    def owners(self) -> tuple[int, ...]:
        """Of every axis the axis of `whole` that it is, or is a part of."""
        return tuple(range(self.ndim))

    @property
    def words(self) -> tuple[str, ...]:
        """Names that axes may be called by."""
        return self.names

    def named(self, name: str) -> tuple[int, ...]:
        """The axis of a name; of an axis of `whole` all parts. Raises MeshError."""
        return (self.index(name),)

    def shown(self, axes: Sequence[int]) -> tuple[str, ...]:
        """Names of axes; all parts of one, in their order, go by its name."""
        return tuple(self.names[i] for i in axes)

    def as_parts(self, spec: Sequence[int]) -> tuple[int, ...]:
        """A placement per axis of `whole` as one per axis of this mesh: all parts lie alike."""
        return tuple(spec[a] for a in self.owners)

    def as_whole(self, spec: Sequence[int]) -> tuple[int, ...] | None:
        """Inverse of `as_parts`; None where parts of one axis lie otherwise than each other."""
        found = tuple(spec[self.owners.index(a)] for a in range(self.whole.ndim))
        return found if self.as_parts(found) == tuple(spec) else None

    def label(self, axes: Sequence[int]) -> str:
        """Axes taken as one, as plans and reports write them: `(0, 1)` -> `"dp+tp"`; one axis goes by its name."""
        return "+".join(self.shown(axes))

    def axes(self, label: str) -> tuple[int, ...]:
        """Inverse of `label`. Raises MeshError."""
        return tuple(i for name in label.split("+") for i in self.named(name))

    def ranks(self, axes: Sequence[int]) -> int:
        """How many ranks differ on `axes` alone."""
        return prod(self.sizes[i] for i in axes)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Coordinates of `rank`, one per axis, major first."""
        out = []
        for size in reversed(self.sizes):
            out.append(rank % size)
            rank //= size
        return tuple(reversed(out))

    def rank_at(self, coordinates: Sequence[int]) -> int:
        """Inverse of `coordinates`."""
        rank = 0
        for size, c in zip(self.sizes, coordinates, strict=True):
            rank = rank * size + c
        return rank

    def __str__(self) -> str:
        return ",".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True))


AUTO = "auto:"


@dataclass(frozen=True)
class AnyMesh:
    """A mesh that is to be chosen, of so many devices."""

    size: int

    def __post_init__(self) -> None:
        if not 1 <= self.size <= MOST_RANKS:
            raise MeshError(f"a mesh of {self.size} devices; there are 1 to {MOST_RANKS}")

    def __str__(self) -> str:
        return f"{AUTO}{self.size}"


def mesh_or_any(value: Any) -> Mesh | AnyMesh:
    """`mesh_of`, and "auto:64" or 64. Raises MeshError."""
    if isinstance(value, AnyMesh):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return AnyMesh(value)
    if not (isinstance(value, str) and value.strip().startswith(AUTO.rstrip(":"))):
        return mesh_of(value)
    number = value.strip().removeprefix(AUTO)
    if not number.isdecimal():
        raise MeshError(f"cannot read mesh {value!r}; write auto:64 for any mesh of 64 devices")
    return AnyMesh(int(number))


def mesh_of(value: Any) -> Mesh:
    """A Mesh from text, a Mesh, or a torch DeviceMesh. Raises MeshError."""
    if isinstance(value, Mesh):
        return value
    if isinstance(value, str):
        return parse_mesh(value)
    if hasattr(value, "mesh_dim_names") and hasattr(value, "shape"):  # a DeviceMesh: this module does not know torch
        return Mesh(tuple(value.mesh_dim_names or (f"d{i}" for i in range(value.ndim))), tuple(value.shape))
    raise MeshError(f"the mesh is {value!r:.60}, a {type(value).__name__}; write it as text, {_as_text(value)!r}, or give an autoshard.Mesh "
                    "or a torch DeviceMesh")


def _as_text(value: Any) -> str:
    """What was most likely meant."""
    sizes = list(value.values() if isinstance(value, dict) else value) if isinstance(value, (dict, list, tuple)) else [value]
    if not sizes or not all(type(n) is int and n > 0 for n in sizes):
        return "dp=2,tp=4"
    names = list(value) if isinstance(value, dict) else ["dp", "tp", "sp"][:len(sizes)] if len(sizes) < 4 else [f"d{i}" for i in range(len(sizes))]
    return ",".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))


def parse_mesh(text: str) -> Mesh:
    """`"dp=2,tp=4"` (or `"2x4"` / `"8"`, axes then named d0, d1, ...) to a Mesh. Raises MeshError."""
    parts = [p.strip() for p in text.replace("x", ",").split(",")] if "=" not in text else [
        p.strip() for p in text.split(",")]
    names, sizes = [], []
    for i, part in enumerate(parts):
        name, _, size = part.rpartition("=")
        try:
            sizes.append(int(size))
        except ValueError:
            raise MeshError(f"cannot read mesh {text!r} at {part!r}; write for example dp=2,tp=4") from None
        names.append(name.strip() or f"d{i}")
    return Mesh(tuple(names), tuple(sizes))
