"""A traced program: planned as one, or cut into stages that are planned one by one."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from autoshard.base.fine_mesh import NEVER
from autoshard.base.mesh import Mesh
from autoshard.base.plan import Plan
from autoshard.base.spec import Spec
from autoshard.cost.cluster import Cluster, load_cluster
from autoshard.decide.options import Options
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.decide.pipeline_options import AUTO, Pipeline
from autoshard.pipeline.cutting.layout import layout_of
from autoshard.pipeline.merge import merged
from autoshard.pipeline.pipelined import pipelined, submesh
from autoshard.pipeline.plan_stages import plan_stages
from autoshard.pipeline.shapes.cut_search import SHORT_STAGES, choices, search_cuts
from autoshard.planner.finer import plan_finer
from autoshard.planner.one_stage import decide, prices
from autoshard.planner.stage_planner import StagePlanner
from autoshard.program.calling import Traced
from autoshard.seeds.seeds import resolve_seeds


def plan_traced(traced: Traced, mesh: Mesh, options: Options, *, clock: PhaseTimer | None = None, has_loss: bool = False,
                model_info: Mapping[str, Any] | None = None, fixed: Mapping[str, Spec] | None = None,
                profile: Cluster | None = None, interruptible: bool = True, coarser: Sequence[Plan] = (),
                rates: Sequence[float] = ()) -> Plan:
    """The search half of the pipeline, for a graph that is traced already. `fixed` placements of parameters,
    buffers and inputs by name come before seeds: that is how they are held already. `profile`: what `options.cluster` held
    when it was read; without it, it is read now. `coarser`: as of `decide`. `rates`: of stages, as of `plan_stages`."""
    clock = clock or PhaseTimer()
    if options.pipeline.stages(mesh) > 1:
        return plan_pipeline(traced, mesh, options, clock, fixed or {}, profile or load_cluster(options.cluster), rates,
                             has_loss=has_loss, model_info=model_info, interruptible=interruptible)
    if options.refine_axes != NEVER:
        return plan_finer(traced, mesh, options, clock=clock, fixed=fixed, profile=profile or load_cluster(options.cluster), coarser=coarser,
                          has_loss=has_loss, model_info=model_info, interruptible=interruptible)
    return decide(prices(traced, mesh, options, clock=clock, fixed=fixed, profile=profile), options, clock=clock, has_loss=has_loss,
                  model_info=model_info, interruptible=interruptible, coarser=coarser)


def plan_pipeline(traced: Traced, mesh: Mesh, options: Options, clock: PhaseTimer, fixed: Mapping[str, Spec], profile: Cluster,
                  rates: Sequence[float] = (), *, interruptible: bool = True, **how: Any) -> Plan:
    """Cut the graph, plan every stage on its submesh, and put the plans together."""
    resolve_seeds(traced.graph, submesh(mesh, options.pipeline.axis), options.seeds)  # what matches nothing at all
    wire, tell = profile.links_for(mesh)[0], partial(clock.say, "stages")
    plan_stage = StagePlanner(traced, submesh(mesh, options.pipeline.axis), options, profile, wire, clock.quiet(), interruptible, **how)

    def plan_with(choice: Pipeline) -> Plan:
        with clock("cut"):
            made = pipelined(traced.graph, mesh, choice, profile)
        found = merged(made, plan_stages(made, fixed, plan_stage, tell, rates), wire)
        where = layout_of(made.cut.blocks, made.cut.starts) or f"stages from {', '.join(made.cut.names)}"
        tell(f"{where} by {made.options.schedule}: {found.objective_s:.4g} s, at least {found.bound_s:.4g} s")
        return found

    short = partial(plan_stage, asked=replace(options, time_limit=options.time_limit / SHORT_STAGES))
    if options.pipeline.cuts == AUTO and not options.pipeline.layout:
        tell("prices of short stages, for the cuts")
    return search_cuts(choices(traced.graph, options.pipeline.stages(mesh), options.pipeline, short, profile, wire, options.memory_limit(profile)),
                       plan_with)
