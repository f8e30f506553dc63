"""What is held already, as seeds."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autoshard.base.graph import Graph
from autoshard.base.roles import Role
from autoshard.base.spec import Spec
from autoshard.seeds.seeds import Seeds


def holding(seeds: Seeds, graph: Graph, fixed: Mapping[str, Spec]) -> Seeds:
    """The seeds, with placements of parameters, buffers (also where they are only written) and inputs by name before them, and of what
    stages of a pipeline exchange."""
    held = {op.name: frozenset({tuple(fixed[str(op.target)])}) for op in graph.of_kind("param", "buffer", "input", "tangent", "output")
            if str(op.target) in fixed and (op.is_port or op.kind in ("param", "buffer", "input"))}
    written = {op.name: frozenset({tuple(fixed[name])}) for name, op in graph.outputs(Role.MUTATION).items() if name in fixed}
    return replace(seeds, specs={**seeds.specs, **held, **written})
