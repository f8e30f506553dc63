"""Placements that user collectives fix (see program/tracing/user_collectives.py): the specs that a mark such as ("P", "tp") allows.

A group is written as the mesh axis's name, or as `"4@2"`: 4 ranks, each 2 after the one before. That is the same text on
every rank of the mesh, so all ranks trace one graph."""
from __future__ import annotations

import difflib
from itertools import combinations, product
from math import prod

from autoshard.base.graph import TensorMeta
from autoshard.base.mesh import Mesh
from autoshard.base.spec import R, Spec, divides, is_partial, parse_spec
from autoshard.errors import SeedError
from autoshard.rules.notation import is_number

FREE = "R"  # a gradient of what is whole on every rank may come as parts: nothing is given about it


def gradient_of(placement: str) -> str:
    """The placement of a value's gradient: parts of a sum have a whole gradient, pieces of a tensor pieces of it."""
    return "R" if placement.startswith("P") else placement


def group_text(ranks: list[int]) -> str | None:
    """`[1, 3]` -> `"2@2"`; None where the ranks are not evenly apart, as those of a mesh axis are."""
    steps = {b - a for a, b in zip(ranks, ranks[1:], strict=False)}
    return f"{len(ranks)}@{max(steps, default=1)}" if len(steps) < 2 and min(steps, default=1) > 0 else None


def axes_of(group: str, mesh: Mesh, origin: str) -> tuple[int, ...]:
    """The mesh axes that a group spans. Raises SeedError, naming `origin`, for a group that is none."""
    size, _, step = group.partition("@")
    if group in mesh.names:
        return (mesh.index(group),)
    for first, end in combinations(range(mesh.ndim + 1), 2) if step else ():
        if prod(mesh.sizes[first:end]) == int(size) and prod(mesh.sizes[end:]) == int(step):
            return tuple(range(first, end))
    near = difflib.get_close_matches(group, mesh.names, n=1)
    what = f"a group of {size} ranks that are {step} apart" if step else f"the group {group!r}"
    raise SeedError(f"{origin} is over {what}, which is no axis of the mesh {mesh}{f' (did you mean {near[0]}?)' if near else ''}; "
                    "give the name of a mesh axis, a DeviceMesh of one axis, (DeviceMesh, dim) or the axis's process group")


def given_specs(placement: str, axes: tuple[int, ...], meta: TensorMeta, mesh: Mesh, origin: str) -> frozenset[Spec]:
    """All specs that have `placement` ("P", "Pmax", "Pmin", "R", or "S1" of a tensor dim) on `axes`; the other axes are free.
    Raises SeedError, naming `origin`, where the value cannot lie so."""
    (given,) = parse_spec(placement)
    given = meta.split_dim(given) if given >= 0 else given
    if is_partial(given) and not is_number(meta.dtype):
        raise SeedError(f"{origin} reduces numbers of dtype {str(meta.dtype).removeprefix('torch.')}, of which parts cannot be "
                        "planned; make them floating point before")
    others = (R, *(d for d in range(meta.ndim) if d not in meta.part_dims), *([given] if is_partial(given) else []))
    choices = [(R,) if size == 1 else (given,) if a in axes else others for a, size in enumerate(mesh.sizes)]
    found = frozenset(s for s in product(*choices) if divides(meta.logical_shape, s, mesh.sizes))
    if not found:
        raise SeedError(f"{origin} splits dim {placement[1:]} of a tensor of shape {meta.shape} unevenly on mesh {mesh}; "
                        "the shapes are read as those of one device: build the model with whole weights, or use another mesh")
    return found
