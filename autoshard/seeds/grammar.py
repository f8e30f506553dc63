"""The grammar of seeds: the forms of a seed's value, and the specs that it allows for a tensor."""
from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard

from autoshard.base.graph import TensorMeta
from autoshard.base.mesh import Mesh
from autoshard.base.spec import R, ShardingSpec, Spec, format_spec, parse_spec, stores
from autoshard.errors import MeshError, SeedError

OPEN = (..., "?", "...")
WHOLE = (None, "-", "")
PER_AXIS = re.compile(r"(S\(?\d+\)?|R)(,(S\(?\d+\)?|R))*")
ROLE = re.compile(r"(input|output):\S+|[A-Za-z_]\w*(\.\w+)+")
"""Another tensor, in place of a layout."""


@dataclass(frozen=True)
class Seed:
    """A seed's value with the place it was written at, for messages."""

    value: Any
    where: str = ""

    def __str__(self) -> str:
        return seed_text(self.value)


STAGE = re.compile(r"stage\((\d+)\)")


@dataclass(frozen=True)
class InStage:
    """A stage of the pipeline, in place of a layout."""

    index: int

    def __str__(self) -> str:
        return f"stage({self.index})"


def stage(index: int) -> InStage:
    """The value of a seed that puts modules into a stage: `seeds={"layers.0*": autoshard.stage(0)}`. Raises SeedError."""
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise SeedError(f"stage({index!r}): stages are numbered 0, 1, 2, ...")
    return InStage(index)


def stage_of(value: Any) -> int | None:
    """The stage that a seed's value names; None of layouts."""
    if isinstance(value, Seed):
        return stage_of(value.value)
    found = STAGE.fullmatch(value.strip()) if isinstance(value, str) else None
    return value.index if isinstance(value, InStage) else int(found[1]) if found else None


def seed_text(value: Any) -> str:
    """A seed's value as the command line writes it: `("tp", None)` -> `"tp,-"`, `(Shard(0), Replicate())` -> `"S(0),R"`.

    Raises SeedError for a value of another kind."""
    if isinstance(value, Seed):
        return seed_text(value.value)
    if isinstance(value, str):
        return ",".join(p.strip() for p in value.strip().strip("[]").split(","))
    if isinstance(value, InStage):
        return str(value)
    if isinstance(value, ShardingSpec):
        return ",".join("*".join(d) or "-" for d in value.dims)
    if not isinstance(value, (tuple, list)):
        raise SeedError(f"a seed has value {value!r}; give one entry per tensor dim, for example ('tp', None) or 'tp,-'")
    if any(isinstance(v, Partial) for v in value):
        raise SeedError(f"a seed has value {value!r}; Partial cannot be a seed, since nothing becomes a sum of parts by being moved")
    if value and all(isinstance(v, (Shard, Replicate)) for v in value):
        return ",".join(f"S({v.dim})" if isinstance(v, Shard) else "R" for v in value)
    odd = [v for v in value if not (v is None or v is ... or isinstance(v, (str, tuple, list)))]
    if odd:
        raise SeedError(f"a seed has the entry {odd[0]!r}; an entry is an axis, a tuple of axes, None, '?' or ...")
    return ",".join("?" if v in OPEN[1:2] else "..." if v in OPEN else "-" if v in WHOLE else v if isinstance(v, str)
                    else "*".join(map(str, v)) for v in value)


def specs_of(text: str, meta: TensorMeta, mesh: Mesh, origin: str) -> frozenset[Spec]:
    """The specs that a seed's text allows for a tensor; none where a dim does not divide. An axis of size 1 splits nothing.
    Raises SeedError, naming `origin`."""
    if PER_AXIS.fullmatch(text) and not set(text.split(",")) <= set(mesh.words):
        found = [_per_axis(text, meta, mesh, origin)]
    else:
        found = list(_expand(_per_dim(text, len(meta.shape), mesh, origin), meta, mesh))
    return frozenset(tuple(p if size > 1 else R for p, size in zip(spec, mesh.sizes, strict=True)) for spec in found)


def _per_axis(text: str, meta: TensorMeta, mesh: Mesh, origin: str) -> Spec:
    spec = parse_spec(text)
    spec = mesh.as_parts(spec) if len(spec) == mesh.whole.ndim else spec
    if len(spec) != mesh.ndim or max(spec) >= len(meta.shape):
        raise SeedError(f"seed {origin}: give one Shard or Replicate per mesh axis ({mesh}) on dims below {len(meta.shape)}")
    spec = tuple(meta.split_dim(p) if p >= 0 else p for p in spec)
    if not stores(meta, spec, mesh.sizes):
        raise SeedError(f"seed {origin} splits a tensor of shape {meta.true_shape} unevenly ({format_spec(spec)} on mesh {mesh}); "
                        f"shard a dim that the axis size divides{in_parts(meta)}")
    return spec


def in_parts(meta: TensorMeta) -> str:
    """For messages: which dims consist of parts, and which are padded."""
    found = [f"dim {d} consists of {meta.parts_of(d)} parts, each of which is split" for d in range(len(meta.shape)) if meta.parts_of(d) > 1]
    found += [f"dim {d} is padded to {n}, for an axis that {true} does not divide over; other axes do not split it"
              for d, (true, n) in enumerate(zip(meta.true_shape, meta.shape, strict=True)) if true != n]
    return f" ({'; '.join(found)})" if found else ""


def _per_dim(text: str, ndim: int, mesh: Mesh, origin: str) -> list[tuple[str, ...] | None]:
    """Axes per dim; None for an open dim. A trailing `...` (or `?`) opens all dims that remain."""
    entries = [e.strip() for e in text.split(",")] if ndim or text not in WHOLE else []
    if entries and entries[-1] in OPEN and len(entries) < ndim:
        entries += ["?"] * (ndim - len(entries))
    if entries and entries[-1] == "..." and len(entries) == ndim + 1:
        entries.pop()
    if len(entries) != ndim:
        raise SeedError(f"seed {origin} gives {len(entries)} dims for a tensor with {ndim}; end it with ... to leave the rest open")
    out: list[tuple[str, ...] | None] = []
    for entry in entries:
        axes = None if entry in OPEN else () if entry in WHOLE else tuple(entry.strip("()").split("*"))
        for axis in axes or ():
            if axis not in mesh.words:
                near = difflib.get_close_matches(str(axis), mesh.words, n=1)
                raise SeedError(f"seed {origin} names mesh axis {axis!r}; the mesh has {mesh}{f' (did you mean {near[0]}?)' if near else ''}")
        out.append(axes)
    return out


def _expand(dims: list[tuple[str, ...] | None], meta: TensorMeta, mesh: Mesh) -> Iterable[Spec]:
    """All specs with the closed dims as given and the free axes on open dims or nowhere. A closed dim that is made of
    several logical dims is split along the major one, one that is made of parts within each of them."""
    logical: list[tuple[str, ...]] = [()] * meta.ndim
    for d, axes in enumerate(dims):
        if axes:
            logical[meta.split_dim(d)] = tuple(a for a in axes if mesh.ranks(mesh.axes(a)) > 1 or len(axes) == 1)
    try:
        base = ShardingSpec(tuple(logical)).to_spec(mesh)
    except MeshError as e:
        raise SeedError(str(e)) from None
    open_dims = [i for d, axes in enumerate(dims) if axes is None for i in meta.logical_dims(d) if i not in meta.part_dims]
    free = [a for a in range(mesh.ndim) if base[a] == R]
    for choice in product((R, *open_dims), repeat=len(free)):
        spec = list(base)
        for a, p in zip(free, choice, strict=True):
            spec[a] = p
        if stores(meta, tuple(spec), mesh.sizes):
            yield tuple(spec)
