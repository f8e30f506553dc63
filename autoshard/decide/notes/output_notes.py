"""Notes of a plan about outputs that stay split."""
from __future__ import annotations

from autoshard.base.graph import Graph
from autoshard.base.plan import Plan
from autoshard.base.roles import Role
from autoshard.base.spec import ShardingSpec, is_shard
from autoshard.program.output_modes import AUTO, DTENSOR, modes_of


def output_notes(graph: Graph, plan: Plan) -> tuple[str, ...]:
    """A line per output that outputs="auto" hands out as a DTensor which is split."""
    wanted = str(plan.settings.get("outputs", ""))
    if AUTO not in wanted:
        return ()
    modes, lines = modes_of(graph, wanted), []
    for name, op in graph.outputs(Role.USER).items():
        spec, meta = plan.ops[op.name].inputs[0], graph.meta(op.refs[0])
        if modes[name] == DTENSOR and any(map(is_shard, spec)):
            shape = " x ".join(map(str, meta.shape))
            lines.append(f"output:{name} ({shape}) stays split, {ShardingSpec.from_spec(spec, meta.ndim, plan.mesh)}: it stands beside the loss that "
                         "is trained, so it is handed out as a DTensor, and full_tensor() gathers it; outputs='replicate' gathers it at every step")
    return tuple(lines)
