"""Whole tensors to the pieces of all ranks, and back. Specs are on logical dims."""
from __future__ import annotations

from dataclasses import dataclass

import torch

from autoshard.base.graph import TensorMeta
from autoshard.base.mesh import Mesh
from autoshard.base.pads import with_pad, without_pad
from autoshard.base.spec import REDUCE_OPS, R, Spec, is_inner, local_shape, split_by
from autoshard.collectives.reduce_ops import combined
from autoshard.program.calling import as_stored
from autoshard.verification.one_process.collectives import Ranked


@dataclass(frozen=True, eq=False)
class Joined:
    """`whole`, and the largest norm of a difference between ranks that should hold the same numbers."""

    whole: torch.Tensor
    disagreement: float


def cut(whole: torch.Tensor, meta: TensorMeta, spec: Spec, mesh: Mesh) -> Ranked:
    """Every rank's contiguous piece, with its pad; ranks with the same piece share it. `spec` has no Partial."""
    pieces, (axes, ranks) = [as_stored(with_pad(whole, meta)).reshape(meta.logical_shape)], _major_first(spec, mesh)
    for a in axes:
        pieces = [part for p in pieces for part in ([p] * mesh.sizes[a] if spec[a] == R else p.chunk(mesh.sizes[a], split_by(spec[a])))]
    made: dict[int, torch.Tensor] = {}
    found = [made.setdefault(id(p), p.reshape(meta.unflatten(tuple(p.shape))).contiguous()) for p in pieces]
    return [found[i] for i in sorted(range(mesh.size), key=ranks.__getitem__)]


def _major_first(spec: Spec, mesh: Mesh) -> tuple[list[int], list[int]]:
    """The axes as their pieces nest, inner shards last, and the ranks counted in that order of axes."""
    axes = sorted(range(mesh.ndim), key=lambda a: is_inner(spec[a]))
    return axes, torch.arange(mesh.size).reshape(mesh.sizes).permute(axes).flatten().tolist()


def joined(pieces: Ranked, meta: TensorMeta, spec: Spec, mesh: Mesh) -> Joined:
    """The whole tensor: shards put together, Partial values combined, replicas compared."""
    wanted = local_shape(meta.logical_shape, spec, mesh.sizes)
    axes, ranks = _major_first(spec, mesh)
    parts, off = [pieces[r].reshape(wanted) for r in ranks], 0.0
    for placement, n in ((split_by(spec[a]), mesh.sizes[a]) for a in reversed(axes)):
        sets = [parts[i:i + n] for i in range(0, len(parts), n)]
        if placement == R:
            off = max([off, *(distance(s[0], p) for s in sets for p in s[1:] if p is not s[0])])
            parts = [s[0] for s in sets]
        elif placement >= 0:
            parts = [torch.cat(s, placement) for s in sets]
        else:
            parts = [combined(s, REDUCE_OPS[placement]) for s in sets]
    return Joined(parts[0].reshape(meta.shape), off)


def seen(found: Joined, meta: TensorMeta) -> Joined:
    """What users see of a tensor put together: not its pad."""
    return Joined(without_pad(found.whole, meta), found.disagreement)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference; equal infinities and NaNs differ by nothing, an unequal NaN by infinity."""
    if a.dtype == torch.bool or not (a.dtype.is_floating_point or a.dtype.is_complex):
        return float((a.to(torch.float64) - b.to(torch.float64)).norm())
    wide = torch.complex128 if a.dtype.is_complex else torch.float64
    a, b = a.to(wide), b.to(wide)
    difference = torch.where((a == b) | (a.isnan() & b.isnan()), torch.zeros((), dtype=wide), a - b)
    off = float(difference.norm())
    return off if off == off else float("inf")
