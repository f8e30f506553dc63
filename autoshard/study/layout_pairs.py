"""The price of a redistribution between any two layouts of a value, also where axes nest out of mesh order.

Plans nest axes in mesh order, and those of stored weights and their gradients in the other orders that a spec can say; such pairs are priced, and
lowered, by `cost/redistribute.py`. For an activation a layout such as `tp*dp,-` on a mesh
`dp,tp` is one a plan cannot have, but a question one can ask. Then the cheapest sequence is looked for (Dijkstra, 1959) over the layouts whose
axes nest in any order, with the steps and prices of redistribute.py:

    slice         an axis that splits nothing becomes the minor one of a dim
    all_gather    the minor axes of a dim, one or several, are gathered
    all_to_all    the minor axes of a dim become those of another dim
"""
from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch

from autoshard.base.graph import Ref
from autoshard.base.mesh import Mesh
from autoshard.base.spec import R, ShardingSpec, Spec, is_inner, nested
from autoshard.cost.redistribute import Redistribution, step_seconds
from autoshard.errors import SeedError
from autoshard.program.flow import laid_as_stored
from autoshard.seeds.grammar import seed_text, specs_of
from autoshard.space.cost_table import CostTable
from autoshard.study.explain import COLLECTIVE_WORDS

Nested = tuple[tuple[int, ...], ...]
"""Per tensor dim the mesh axes that split it, major first."""


@dataclass(frozen=True)
class LayoutPair:
    """Going from `source` to `target`: pieces per dim of both, the steps in order ("AllToAll over tp"), the bytes of the collectives, seconds.
    `in_plans`: whether a plan can have both layouts."""

    value: str
    shape: tuple[int, ...]
    source: str
    target: str
    splits: tuple[tuple[int, ...], tuple[int, ...]]
    steps: tuple[str, ...]
    nbytes: int
    seconds: float
    in_plans: bool

    @property
    def words(self) -> str:
        """The steps as one phrase, `"0"` where nothing moves."""
        return ", ".join(self.steps) or "0"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def layout_pair(table: CostTable, value: Ref, source: str, target: str) -> LayoutPair:
    """What `value` takes to go from `source` to `target`, both written as seeds are, with axes of a dim in any order ("tp*dp,-"). Raises
    SeedError for a text that is no closed layout of the value, or splits it unevenly."""
    meta, mesh = table.graph.meta(value), table.mesh
    ends = [_read(text, table, value, f"{flag} {text}") for flag, text in (("--source", source), ("--target", target))]
    stored = value.op in laid_as_stored(table.graph)
    plain = [_spec(e, mesh, stored) for e in ends]
    if None not in plain:
        found = [(s.kind, s.axes, s.nbytes, s.seconds) for s in table.steps(meta, *plain)]
    else:
        found = _cheapest(table.redistribution, meta.logical_shape, meta.dtype, *ends)
    shown = tuple(_text(e, mesh) for e in ends)
    splits = tuple(tuple(prod((mesh.sizes[a] for a in axes), start=1) for axes in e) for e in ends)
    words = tuple(f"{COLLECTIVE_WORDS[kind]} over {mesh.label(axes)}" for kind, axes, _, _ in found)
    return LayoutPair(str(value), meta.logical_shape, *shown, splits, words, sum(n for _, _, n, _ in found),
                      sum(s for *_, s in found), None not in plain)


def _read(text: str, table: CostTable, value: Ref, origin: str) -> Nested:
    """The layout that a text says. Axes of one dim may come in any order: they are checked as if in mesh order."""
    meta, mesh = table.graph.meta(value), table.mesh
    entries = seed_text(text).split(",")
    named = [e.strip("()").split("*") for e in entries]
    known = [[a for name in names if name in mesh.words for a in mesh.named(name)] for names in named]
    ordered = [("*".join(mesh.names[a] for a in sorted(axes)) if axes and all(name in mesh.words for name in names) else e)
               for e, names, axes in zip(entries, named, known, strict=True)]
    allowed = specs_of(",".join(ordered), meta, mesh, origin)
    if len(allowed) != 1:
        why = "splits it unevenly" if not allowed else "is open; say of every dim which axes split it"
        raise SeedError(f"{origin} for {value} of shape {list(meta.shape)} {why}")
    (spec,) = allowed
    found = [[a for a, p in enumerate(spec) if p == d] for d in range(meta.ndim)]
    if len(entries) == len(meta.shape) and not any(mesh.sizes[a] == 1 for a in range(mesh.ndim)):
        for d, axes in enumerate(known):
            if len(axes) > 1:
                found[meta.split_dim(d)] = axes
    return tuple(map(tuple, found))


def _spec(layout: Nested, mesh: Mesh, stored: bool) -> Spec | None:
    """The spec a plan has for a layout; None where axes nest out of mesh order, and of a `stored` value where no spec says so."""
    placed = [nested(d, axes) for d, axes in enumerate(layout)]
    found = {a: p for each in placed for a, p in (each or {}).items()}
    if None in placed or not stored and any(map(is_inner, found.values())):
        return None
    return tuple(found.get(a, R) for a in range(mesh.ndim))


def _text(layout: Nested, mesh: Mesh) -> str:
    return str(ShardingSpec(tuple(map(mesh.shown, layout))))


def _cheapest(prices: Redistribution, shape: tuple[int, ...], dtype: torch.dtype, source: Nested,
              target: Nested) -> list[tuple[str, tuple[int, ...], int, float]]:
    """Steps (kind, axes, bytes, seconds); of equal prices the fewest."""
    count = itertools.count()
    queue = [(0.0, 0, next(count), source, ())]
    seen: set[Nested] = set()
    while queue:
        seconds, steps, _, at, path = heapq.heappop(queue)
        if at == target:
            return list(path)
        if at in seen:
            continue
        seen.add(at)
        for kind, axes, src, dst, after in _moves(at, prices.mesh):
            if after not in seen and _divides(shape, after, prices.mesh):
                step = _priced(prices, shape, dtype, kind, axes, src, dst, at, after)
                heapq.heappush(queue, (seconds + step[3], steps + 1, next(count), after, (*path, step)))
    raise SeedError(f"no way leads from {source} to {target} for shape {list(shape)}")


def _moves(at: Nested, mesh: Mesh) -> Iterator[tuple[str, tuple[int, ...], int, int, Nested]]:
    used = {a for axes in at for a in axes}
    for d in range(len(at)):
        for a in range(mesh.ndim):
            if a not in used:
                yield "slice", (a,), -1, d, _with(at, {d: (*at[d], a)})
        for k in range(len(at[d])):
            kept, moved = at[d][:k], at[d][k:]
            yield "all_gather", moved, d, -1, _with(at, {d: kept})
            for e in range(len(at)):
                if e != d:
                    yield "all_to_all", moved, d, e, _with(at, {d: kept, e: (*at[e], *moved)})


def _with(at: Nested, change: dict[int, tuple[int, ...]]) -> Nested:
    return tuple(change.get(d, axes) for d, axes in enumerate(at))


def _local(shape: tuple[int, ...], at: Nested, mesh: Mesh) -> tuple[int, ...]:
    return tuple(n // prod((mesh.sizes[a] for a in axes), start=1) for n, axes in zip(shape, at, strict=True))


def _divides(shape: tuple[int, ...], at: Nested, mesh: Mesh) -> bool:
    return all(n % prod((mesh.sizes[a] for a in axes), start=1) == 0 for n, axes in zip(shape, at, strict=True))


def _priced(prices: Redistribution, shape: tuple[int, ...], dtype: torch.dtype, kind: str, axes: tuple[int, ...], src: int, dst: int,
            at: Nested, after: Nested) -> tuple[str, tuple[int, ...], int, float]:
    """One step, as redistribute.py prices it."""
    before, later = _local(shape, at, prices.mesh), _local(shape, after, prices.mesh)
    held = (prod(before) * dtype.itemsize, prod(later) * dtype.itemsize)
    group = tuple(sorted(axes))
    if kind == "slice":
        return kind, group, 0, 0.0
    nbytes = held[1] if kind == "all_gather" else held[0]
    rearranged = held[1] * (src >= 0 and prod(later[:src]) > 1) + held[0] * (dst >= 0 and prod(before[:dst]) > 1)
    link = prices.links.get(group) or prices.cluster.link_of(prices.mesh, group)
    return kind, group, nbytes, step_seconds(kind, nbytes, int(rearranged), link, prices.cluster)
