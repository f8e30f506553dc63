"""Notes of a plan about outputs that stand beside a loss: those that stay split, and those that are whole for nobody, perhaps."""
from __future__ import annotations

from autoshard.base import quantities
from autoshard.base.graph import Graph
from autoshard.base.plan import Plan
from autoshard.base.roles import Role
from autoshard.base.spec import ShardingSpec, is_shard
from autoshard.program.output_modes import DTENSOR, LARGE, REPLICATE, beside_a_loss, modes_of


def output_notes(graph: Graph, plan: Plan) -> tuple[str, ...]:
    """A line per large output beside a loss, whether it is handed out as a DTensor that is split or made whole at every step."""
    outputs, lines = graph.outputs(Role.USER), []
    modes = modes_of(graph, str(plan.settings.get("outputs", REPLICATE)))
    for name in sorted(beside_a_loss(graph)):
        op = outputs[name]
        meta, spec = graph.meta(op.refs[0]), plan.ops[op.name].inputs[0]
        what = f"output:{name} ({' x '.join(map(str, meta.shape))})"
        seconds = sum(c.seconds for c in plan.collectives if c.op == op.name and not c.inner)
        if modes[name] == DTENSOR and any(map(is_shard, spec)):
            lines.append(f"{what} stays split, {ShardingSpec.from_spec(spec, meta.ndim, plan.spec_mesh)}: it stands beside the loss that is trained, "
                         "so it is handed out as a DTensor, and full_tensor(), called on every rank, gathers it; outputs='replicate' gathers it "
                         "at every step")
        elif modes[name] == REPLICATE and meta.nbytes >= LARGE:
            price = f" (to gather it takes {quantities.seconds(seconds)} of {quantities.seconds(plan.objective_s)})" if seconds else ""
            lines.append(f"{what} is whole on every rank at every step{price}, though only the loss beside it is trained; outputs='auto' hands it "
                         "out as the plan splits it, a DTensor")
    return tuple(lines)
