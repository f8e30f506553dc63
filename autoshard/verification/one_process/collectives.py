"""Functional collectives over all ranks at once: a value is a list with the tensor of every rank, in mesh order.

The conventions are those of torch's functional collectives: gathers and scatters work on dim 0, and ranks of
one group are in the order of their coordinates on its axes. Ranks that get the same numbers get the same tensor.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoshard import _torch
from autoshard.base.mesh import Mesh
from autoshard.collectives import KIND_OF
from autoshard.collectives.all_to_all_rows import reference as rows_reference

Ranked = list[Any]
"""One value per rank, in mesh order."""


def groups(mesh: Mesh, axes: Sequence[int]) -> list[list[int]]:
    """Ranks that differ in their coordinates on `axes` only, by those coordinates, the earlier axis major."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.size):
        c = mesh.coordinates(rank)
        found.setdefault(tuple(x for a, x in enumerate(c) if a not in axes), []).append(rank)
    return list(found.values())


def run_collective(target: Any, x: Ranked, arguments: Sequence[Sequence[Any]], mesh: Mesh) -> Ranked:
    """`arguments` are each rank's after the tensor; the last names the mesh axes. Raises LoweringError for what is none."""
    if target is _torch.WAIT:
        return x
    kind, axes = KIND_OF[target], mesh.axes(str(arguments[0][-1]).removeprefix("axis:"))
    out: Ranked = [None] * mesh.size
    for ranks in groups(mesh, axes):
        given = [x[r] for r in ranks]
        if kind.runs.sized:
            found = rows_reference(given, *([arguments[r][i] for r in ranks] for i in (0, 1)), *arguments[0][2:4])
        else:
            found = kind.runs.reference(given, kind.reduce_op(arguments[0]))
        for rank, piece in zip(ranks, found, strict=True):
            out[rank] = piece
    return out
