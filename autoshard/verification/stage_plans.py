"""Plans of a pipeline worth verifying: every stage planned by one of the kinds in `plans.py`, at the given cuts or at balanced ones."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from autoshard.base.graph import Graph
from autoshard.base.mesh import Mesh
from autoshard.base.plan import Plan
from autoshard.base.spec import Spec
from autoshard.cost.cluster import load_cluster
from autoshard.decide.options import Options
from autoshard.pipeline.merge import merged
from autoshard.pipeline.pipelined import pipelined
from autoshard.pipeline.plan_stages import ALL, Room, plan_stages
from autoshard.planner.one_stage import prices
from autoshard.program.calling import Traced
from autoshard.space.cost_table import Training
from autoshard.verification.plans import Plans


def pipeline_plans(traced: Traced, mesh: Mesh, options: Options, names: Iterable[str], fixed: Mapping[str, Spec],
                   has_loss: bool) -> Iterator[tuple[str, Plan]]:
    """(name, plan), each made when it is asked for. Where a stage is one rank all kinds are the same, and one is made. Raises what planning
    raises."""
    profile = load_cluster(options.cluster)
    made, wire = pipelined(traced.graph, mesh, options.pipeline, profile), profile.links_for(mesh)[0]
    names = tuple(names)
    for name in names if made.submesh.size > 1 else names[:1]:
        def plan_stage(graph: Graph, held: Mapping[str, Spec], in_flight: int, room: Room = ALL, name: str = name) -> Plan:
            step = Training(options.optimizer, graph.training, wire=wire, in_flight=in_flight, duty=room.duty)
            table = prices(replace(traced, graph=graph), made.submesh, options, fixed=held, profile=profile, step=step)
            return next(Plans(table, options, has_loss).named((name,)))[1]

        yield name, merged(made, plan_stages(made, fixed, plan_stage), wire)
