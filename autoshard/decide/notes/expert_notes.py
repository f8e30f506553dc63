"""Notes of a plan about layers whose experts cannot be spread over a mesh axis."""
from __future__ import annotations

from autoshard.base.graph import Graph
from autoshard.base.mesh import Mesh
from autoshard.base.plan import Plan
from autoshard.base.spec import is_shard
from autoshard.decide.notes.padding_notes import more
from autoshard.experts.ops import EXPERTS


def expert_notes(graph: Graph, plan: Plan) -> tuple[str, ...]:
    """A line per number of experts and mesh axis over which they cannot be spread: what the plan does there instead."""
    found: dict[tuple[int, int, str], list[str]] = {}
    mesh = plan.spec_mesh
    for op in graph.of_kind("call"):
        if op.target is EXPERTS:
            x, _, _, up, _ = plan.ops[op.name].inputs
            experts = graph.calls[op.name].tensor("up").shape[0]
            for axis in _too_many(mesh, experts):
                found.setdefault((experts, axis, _way(x[axis], up[axis])), []).append(op.module or op.name)
    return tuple(f"{n} experts cannot be spread evenly over the {mesh.sizes[axis]} ranks of mesh axis {mesh.names[axis]!r}, so no tokens "
                 f"travel there: {way} ({names[0]}{more(names)}); an axis whose size divides {n} lets them travel"
                 for (n, axis, way), names in found.items())


def _too_many(mesh: Mesh, experts: int) -> list[int]:
    return [axis for axis, size in enumerate(mesh.sizes) if size > 1 and experts % size]


def _way(tokens: int, weights: int) -> str:
    """What one mesh axis does, see rules/ops/experts.py."""
    if is_shard(weights):
        return "every rank has a share of each expert's hidden features, and all tokens"
    return "every rank takes its own tokens through all experts, whose weights it needs whole" if is_shard(tokens) else "every rank computes them all"
