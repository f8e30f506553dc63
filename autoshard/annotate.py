"""The user's seeds: sharding specs fixed, fully or in part, before the search.

`{"layers.*.attn.wq.weight": ("tp", None), "input:0": ("dp", ...)}`: a key is a glob over parameter names,
`input:INDEX-or-name` or `output:INDEX`; a value gives per tensor dim an axis name, a tuple of axes (major
first), None or "-" for whole, `...` or "?" for open. `ShardingSpec` and DTensor placements work as well.
"""
from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard

from autoshard.errors import MeshError, SeedError
from autoshard.graph import Graph, Op
from autoshard.mesh import Mesh
from autoshard.spec import R, ShardingSpec, Spec, divides

OPEN = (..., "?", "...")
WHOLE = (None, "-", "")


@dataclass(frozen=True)
class Seeds:
    """Allowed specs per op name, and how many values each key matched."""

    specs: Mapping[str, frozenset[Spec]] = field(default_factory=dict)
    matches: Mapping[str, int] = field(default_factory=dict)


def resolve_seeds(graph: Graph, mesh: Mesh, seeds: Mapping[str, Any] | None) -> Seeds:
    """Match every key and expand every value to the specs it allows.

    Raises SeedError for a key that matches nothing (with the nearest names), a malformed value, or two
    keys that disagree about one tensor."""
    found: dict[str, frozenset[Spec]] = {}
    origin: dict[str, str] = {}
    matches: dict[str, int] = {}
    for key, value in (seeds or {}).items():
        ops = list(_matching(graph, key))
        if not ops:
            raise SeedError(f"seed {key!r} matches nothing{_nearest(graph, key)}")
        matches[key] = len(ops)
        for op in ops:
            allowed = _allowed(key, value, op, graph, mesh)
            both = found.get(op.name, allowed) & allowed
            if not both:
                raise SeedError(f"seeds {origin[op.name]!r} and {key!r} both match {op.target} and disagree; keep one of them")
            found[op.name], origin[op.name] = both, key
    return Seeds(found, matches)


def _matching(graph: Graph, key: str) -> Iterable[Op]:
    kind, _, name = key.partition(":")
    if kind == "input" and name:
        inputs = graph.of_kind("input")
        yield from (op for i, op in enumerate(inputs) if name == str(i) or fnmatchcase(str(op.target), name))
    elif kind == "output" and name:
        yield from (op for op in graph.of_kind("output") if fnmatchcase(str(op.target), f"user:{name}"))
    else:
        tied = dict(graph.tied)
        kept = {tied[a] for a in tied if fnmatchcase(a, key)}
        yield from (op for op in graph.of_kind("param") if fnmatchcase(op.target, key) or op.target in kept)


def _nearest(graph: Graph, key: str) -> str:
    names = [str(op.target) for op in graph.of_kind("param")]
    names += [f"input:{i}" for i in range(len(graph.of_kind("input")))]
    near = difflib.get_close_matches(key.replace("*", "0"), names, n=3, cutoff=0.3)
    return f"; the nearest names are {', '.join(near)}" if near else f"; the parameters are {', '.join(names[:5])} ..."


def _allowed(key: str, value: Any, op: Op, graph: Graph, mesh: Mesh) -> frozenset[Spec]:
    meta = op.outputs[0] if op.outputs else graph.meta(op.refs[0])
    if isinstance(value, str):
        value = tuple(p.strip() for p in value.split(","))
    if isinstance(value, ShardingSpec):
        return frozenset({value.to_spec(mesh)})
    if not isinstance(value, (tuple, list)):
        raise SeedError(f"seed {key!r} has value {value!r}; give one entry per tensor dim, for example ('tp', None)")
    if value and all(isinstance(v, (Shard, Replicate, Partial)) for v in value):
        return frozenset({_from_placements(key, value, mesh)})
    dims = _per_dim(key, value, len(meta.shape), mesh)
    allowed = frozenset(_expand(dims, meta.logical_shape, mesh))
    if not allowed:
        raise SeedError(f"seed {key!r} = {value!r} splits {op.target} of shape {meta.shape} unevenly on mesh {mesh}; "
                        "shard a dim that the axis size divides")
    return allowed


def _from_placements(key: str, value: Any, mesh: Mesh) -> Spec:
    if len(value) != mesh.ndim or any(isinstance(v, Partial) for v in value):
        raise SeedError(f"seed {key!r}: give one Shard or Replicate per mesh axis ({mesh}), got {value}")
    return tuple(v.dim if isinstance(v, Shard) else R for v in value)


def _per_dim(key: str, value: Any, ndim: int, mesh: Mesh) -> list[tuple[str, ...] | None]:
    """Axes per dim; None for an open dim. A trailing `...` opens all dims that remain."""
    entries = list(value)
    if entries and entries[-1] in OPEN and len(entries) < ndim:
        entries += [...] * (ndim - len(entries))
    if len(entries) != ndim:
        raise SeedError(f"seed {key!r} gives {len(value)} dims for a tensor with {ndim}; end it with ... to leave the rest open")
    out: list[tuple[str, ...] | None] = []
    for entry in entries:
        axes = None if entry in OPEN else () if entry in WHOLE else (entry,) if isinstance(entry, str) else tuple(entry)
        for axis in axes or ():
            if axis not in mesh.names:
                near = difflib.get_close_matches(str(axis), mesh.names, n=1)
                raise SeedError(f"seed {key!r} names mesh axis {axis!r}; the mesh has {mesh}{f' (did you mean {near[0]}?)' if near else ''}")
        out.append(axes)
    return out


def _expand(dims: list[tuple[str, ...] | None], shape: tuple[int, ...], mesh: Mesh) -> Iterable[Spec]:
    closed = tuple(d if d is not None else () for d in dims)
    try:
        base = ShardingSpec(closed).to_spec(mesh)
    except MeshError as e:
        raise SeedError(str(e)) from None
    open_dims = [i for i, d in enumerate(dims) if d is None]
    free = [a for a in range(mesh.ndim) if base[a] == R]
    for choice in product((R, *open_dims), repeat=len(free)):
        spec = list(base)
        for a, p in zip(free, choice, strict=True):
            spec[a] = p
        if divides(shape, tuple(spec), mesh.sizes):
            yield tuple(spec)
