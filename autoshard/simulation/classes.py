"""Classes of ranks that do the same at the same times, by colour refinement.

Ranks begin with a colour for what is their own (how slow they are, what their links have left). A rank's next colour is its colour with those of all
the groups that it is in, until no class splits any more. Then every rank of a class meets the same classes in each of its groups, so one rank of each
class stands for all of them.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Classes:
    """colour  per rank the number of its class, of the mesh's shape;  count  of classes
    groups     by axes and class, the number of its kind of group
    members    by axes and kind of group, the classes that are in it"""

    colour: np.ndarray
    count: int
    groups: dict[tuple[int, ...], tuple[int, ...]]
    members: dict[tuple[int, ...], tuple[tuple[int, ...], ...]]

    def of_first(self, values: np.ndarray) -> list[float]:
        """A number per rank, which is the same in all of a class, as one per class."""
        _, first = np.unique(self.colour, return_index=True)
        return [float(x) for x in np.broadcast_to(values, self.colour.shape).ravel()[first]]

    def spread(self, values: Sequence[float]) -> np.ndarray:
        """A number per class as one per rank."""
        return np.asarray(values, float)[self.colour]


def classes_of(own: Sequence[np.ndarray], axes: Iterable[tuple[int, ...]], sizes: tuple[int, ...]) -> Classes:
    """Of ranks that differ in the numbers of `own` (arrays that broadcast to the mesh) and meet in groups over each of `axes`."""
    used = sorted(set(axes))
    colour = _numbered([np.broadcast_to(x, sizes) for x in own] or [np.zeros(sizes)])
    while True:
        kinds = {a: _kinds(colour, a) for a in used}
        finer = _numbered([colour, *kinds.values()])
        if finer.max() == colour.max():
            break
        colour = finer
    count = int(colour.max()) + 1
    _, first = np.unique(colour, return_index=True)
    groups = {a: tuple(int(k) for k in kinds[a].flat[first]) for a in used}
    members = {a: tuple(tuple(sorted({c for c in range(count) if groups[a][c] == k})) for k in range(int(kinds[a].max()) + 1)) for a in used}
    return Classes(colour, count, groups, members)


def _numbered(keys: Sequence[np.ndarray]) -> np.ndarray:
    """Equal tuples of keys get equal numbers, from 0 on."""
    rows = np.stack([k.ravel() for k in keys], axis=1)
    return np.unique(rows, axis=0, return_inverse=True)[1].reshape(keys[0].shape)


def _kinds(colour: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Per rank the number of its group's kind: what colours it has, and how many of each."""
    last = tuple(range(colour.ndim - len(axes), colour.ndim))
    moved = np.moveaxis(colour, axes, last)
    rows = np.sort(moved.reshape(*moved.shape[:last[0]], -1), axis=-1)
    kind = np.unique(rows.reshape(-1, rows.shape[-1]), axis=0, return_inverse=True)[1].reshape(moved.shape[:last[0]])
    return np.moveaxis(np.broadcast_to(kind.reshape(*kind.shape, *[1] * len(axes)), moved.shape), last, axes)
