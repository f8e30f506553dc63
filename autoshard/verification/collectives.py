"""Functional collectives over all ranks at once: a value is a list with the tensor of every rank, in mesh order.

The conventions are those of torch's functional collectives: gathers and scatters work on dim 0, and ranks of
one group are in the order of their coordinates on its axes. Ranks that get the same numbers get the same tensor.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch

from autoshard import _torch
from autoshard.errors import LoweringError
from autoshard.base.mesh import Mesh

Ranked = list[Any]
"""One value per rank, in mesh order."""
REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def groups(mesh: Mesh, axes: Sequence[int]) -> list[list[int]]:
    """Ranks that differ in their coordinates on `axes` only, by those coordinates, the earlier axis major."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.size):
        c = mesh.coordinates(rank)
        found.setdefault(tuple(x for a, x in enumerate(c) if a not in axes), []).append(rank)
    return list(found.values())


def run_collective(target: Any, x: Ranked, arguments: Sequence[Any], mesh: Mesh) -> Ranked:
    """`arguments` are those after the tensor; the last names the mesh axes. Raises LoweringError for what is none."""
    if target is _torch.WAIT:
        return x
    kind, axes = _torch.COLLECTIVE_KINDS[target], mesh.axes(str(arguments[-1]).removeprefix("axis:"))
    out: Ranked = [None] * mesh.size
    for ranks in groups(mesh, axes):
        for rank, piece in zip(ranks, _KINDS[kind]([x[r] for r in ranks], arguments), strict=True):
            out[rank] = piece
    return out


def reduced(pieces: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """All pieces combined, in order. Raises LoweringError for an unknown operation."""
    if op not in REDUCE:
        raise LoweringError(f"no reduction {op!r}; known are {', '.join(REDUCE)}")
    return reduce(REDUCE[op], pieces)


def _all_gather(pieces: list[torch.Tensor], arguments: Sequence[Any]) -> Ranked:
    return [torch.cat(pieces)] * len(pieces)


def _all_reduce(pieces: list[torch.Tensor], arguments: Sequence[Any]) -> Ranked:
    return [reduced(pieces, arguments[0])] * len(pieces)


def _reduce_scatter(pieces: list[torch.Tensor], arguments: Sequence[Any]) -> Ranked:
    return list(reduced(pieces, arguments[0]).chunk(len(pieces)))


def _all_to_all(pieces: list[torch.Tensor], arguments: Sequence[Any]) -> Ranked:
    sent = [p.split(list(arguments[1])) for p in pieces]
    return [torch.cat([s[i] for s in sent]) for i in range(len(pieces))]


_KINDS: dict[str, Callable[[list[torch.Tensor], Sequence[Any]], Ranked]] = {
    "all_gather": _all_gather, "all_reduce": _all_reduce, "reduce_scatter": _reduce_scatter, "all_to_all": _all_to_all}
