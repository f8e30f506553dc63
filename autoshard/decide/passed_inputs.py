"""Inputs of which every rank passes its piece: their placement is how they come in."""
from __future__ import annotations

from collections.abc import Container

from autoshard.base.graph import Graph
from autoshard.base.mesh import Mesh
from autoshard.base.spec import R, Spec, divides
from autoshard.decide.options import Passing
from autoshard.errors import UsageError


def as_passed(graph: Graph, mesh: Mesh, passing: Passing, placed: Container[str] = ()) -> dict[str, Spec]:
    """Local inputs by name, split along dim 0 over the batch axes (by default the first of the mesh), but for ops in `placed`, which lie as a
    seed says. Raises UsageError for an input that does not divide."""
    if passing.inputs == "global" or mesh.size == 1:
        return {}
    axes = {mesh.index(a) for a in passing.batch_axes or mesh.names[:1]}
    split = tuple(0 if a in axes else R for a in range(mesh.ndim))
    found = {op.target: op.outputs[0] for op in graph.of_kind("input") if op.outputs[0].shape and op.name not in placed}
    for name, meta in found.items():
        if not divides(meta.logical_shape, split, mesh.sizes):
            over = ", ".join(f"{mesh.names[a]}={mesh.sizes[a]}" for a in sorted(axes))
            raise UsageError(f"{name} of shape {meta.shape} does not split along dim 0 over {over}; choose a multiple")
    return dict.fromkeys(found, split)
