"""Checks that a plan with a pipeline belongs to this program: every stage's part of it, and that both ends of a wire agree."""
from __future__ import annotations

from autoshard.base.graph import Graph
from autoshard.base.mesh import Mesh
from autoshard.base.plan import Plan
from autoshard.base.spec import format_spec
from autoshard.errors import PlanError
from autoshard.pipeline.pipelined import pipelined_as, stage_plan
from autoshard.runtime.check_plan import check_fits, check_subject


def check_stages(plan: Plan, graph: Graph, mesh: Mesh) -> None:
    """Raises PlanError."""
    check_subject(plan, graph, mesh)
    made = pipelined_as(graph, plan)
    for stage in made.cut.stages:
        check_fits(stage_plan(plan, made, stage.index), stage.graph, made.submesh)
    for hop in made.cut.hops:
        sent, received = plan.ops[hop.send].inputs[0], plan.ops[hop.recv].outputs[0]
        if sent != received:
            raise PlanError(f"the plan sends {hop.value} from stage {hop.source} as {format_spec(sent)}, and stage {hop.target} takes it as "
                            f"{format_spec(received)}; plan the model again")
