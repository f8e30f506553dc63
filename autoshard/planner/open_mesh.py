"""From a batch to its plan: traced first, with the mesh and the number of micro-batches chosen where they are open."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from autoshard.base import quantities
from autoshard.base.fine_mesh import NEVER, parse_parts, refined
from autoshard.base.graph import Graph, Op
from autoshard.base.mesh import AnyMesh, Mesh, mesh_of, mesh_or_any
from autoshard.base.plan import Plan
from autoshard.base.spec import replicated
from autoshard.cost.budget import Budget
from autoshard.cost.cluster import AxisLink, Cluster, load_cluster
from autoshard.cost.memory import stored_parts
from autoshard.decide.how import How
from autoshard.decide.least_seconds import Held, Prices, least_run, least_step
from autoshard.decide.memory.at_a_rate import plan_at_rate
from autoshard.decide.options import Options, default_cluster, default_pipeline
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.decide.pipeline_options import AUTO, Pipeline
from autoshard.decide.program import formulate_within, with_starts
from autoshard.decide.walks.greedy import greedy_plans
from autoshard.errors import InfeasibleError, UsageError
from autoshard.pipeline.microbatches import batch
from autoshard.pipeline.shapes.choose import AMPLE, Asked, choose
from autoshard.pipeline.shapes.cut_search import SHORT_STAGES
from autoshard.pipeline.shapes.mesh_prices import Searches
from autoshard.planner.one_stage import decide, prices
from autoshard.planner.stages import plan_traced
from autoshard.program.calling import Traced
from autoshard.search import Clock
from autoshard.search.heap import settled_heap
from autoshard.seeds.seeds import with_held
from autoshard.space.cost_table import CostTable, Training, trained_params

ENOUGH = 0.01
"""The relative gap at which short searches end: prices of blocks leave out that neighbours agree on layouts, which is about as much."""
SHARE = 0.5
"""Of the time that is left for plans of shapes, which the next one may take: the first promises most, and where memory is ample none needs it."""
LEAST = 1.0
"""Seconds that every shape that is planned may take."""


def is_open(mesh: Mesh | AnyMesh, options: Options) -> bool:
    """Whether the mesh, or the number of micro-batches, is to be chosen."""
    return isinstance(mesh, AnyMesh) or options.pipeline.microbatches == AUTO


def check_mesh(mesh: Mesh | AnyMesh, options: Options, profile: Cluster) -> None:
    """Raises ClusterError for more devices than the cluster has, UsageError for stages that the mesh has not, and MeshError or UsageError for parts
    that its axes cannot have."""
    profile.links_for(Mesh(("devices",), (mesh.size,)) if isinstance(mesh, AnyMesh) else mesh)
    parts, asked = parse_parts(options.refine_axes), f"refine_axes={options.refine_axes!r}"
    if isinstance(mesh, Mesh):
        refined(mesh, parts)
        if options.pipeline.stages(mesh) > 1 and parts:
            raise UsageError(f"{asked}: axes of a mesh with pipeline stages ({mesh}) are not taken in parts; write the parts as axes of the mesh")
        if options.pipeline.microbatches == AUTO and parts:
            raise UsageError(f"{asked}: axes are not taken in parts where the number of micro-batches is to be chosen; give a number, such as the "
                             "one that is chosen without parts")
    elif parts:
        raise UsageError(f"{asked} names axes, and the mesh is to be chosen ({mesh}); leave the option out: meshes of more axes are tried")


def asked_for(given: Mapping[str, Any], mesh: Any) -> tuple[Mesh | AnyMesh, Options, Cluster]:
    """Mesh, options and cluster profile of a call of `autoshard.plan`, by its arguments. A bad one is reported here, before the long work."""
    assumed = default_cluster(getattr(mesh, "device_type", "cuda"))
    options = Options.of(given, seeds=with_held(given["model"], given["seeds"]), cluster=given["cluster"] or assumed,
                         pipeline=given["pipeline"] or default_pipeline(mesh))
    wanted, profile = mesh_or_any(mesh), load_cluster(options.cluster)
    check_mesh(wanted, options, profile)
    options.check_offload(profile, given["training"] is not False)
    options.check_microbatches(wanted, given["training"] is not False)
    return wanted, options, profile


def plan_batch(asked: batch.Batch, mesh: Mesh | AnyMesh, options: Options, *, clock: PhaseTimer, profile: Cluster | None = None, **how: Any) -> Plan:
    """Trace, and plan; where mesh or micro-batches are open, choose them. `profile`: instead of `options.cluster`."""
    profile = profile or load_cluster(options.cluster)
    if is_open(mesh, options):
        return plan_open(asked, mesh, replace(options, refine_axes=NEVER), clock, profile, **how)
    with clock("trace"):
        traced = asked.on(mesh_of(mesh), options.pipeline)
    options.check_offload(profile, traced.graph.training)
    options.check_microbatches(mesh, traced.graph.training)
    return plan_traced(traced, mesh_of(mesh), options, clock=clock, profile=profile, **how)


def plan_open(asked: batch.Batch, mesh: Mesh | AnyMesh, options: Options, clock: PhaseTimer, profile: Cluster, **how: Any) -> Plan:
    """Choose what is open of mesh, micro-batches, schedule and cuts, and plan it."""
    wanted = Asked(mesh.size, mesh if isinstance(mesh, Mesh) else None, options.pipeline, profile, options.memory_limit(profile), options.thorough)
    with clock("trace"):
        whole = asked.whole
    options.check_offload(profile, whole.graph.training)
    check_stored(whole.graph, mesh.size, options, wanted.limit, profile)

    made: list[Plan] = []  # without stages: a finer mesh starts from them
    left = options.time_limit

    def plan_shape(on: Mesh, pipeline: Pipeline, rates: Sequence[float]) -> Plan:
        nonlocal left
        with clock("trace"):
            traced = asked.on(on, pipeline)
        before, within = clock.seconds.get("search", 0.0), replace(options, pipeline=pipeline, time_limit=max(SHARE * left, LEAST))
        try:
            found = plan_traced(traced, on, within, clock=clock, profile=profile, coarser=made, rates=rates, **how)
        finally:
            left -= clock.seconds.get("search", 0.0) - before
        made.extend([found] if pipeline.stages(on) == 1 else [])
        return found

    found = choose(asked, wanted, searches(whole, options, clock, profile), plan_shape, partial(clock.say, "shapes"))
    return replace(found, timings=dict(clock.seconds))


def check_stored(graph: Graph, devices: int, options: Options, limit: float, profile: Cluster) -> None:
    """Raises InfeasibleError where parameters, gradients and optimizer state are too much though no two devices hold the same: a proof for all
    shapes."""
    parts = [stored_alone(graph, op, options) for op in graph.of_kind("param", "buffer")]
    each = Budget.of(profile.device, limit).taken(sum(sum(p.values()) for p in parts) / devices)
    if each > limit:
        raise InfeasibleError(f"parameters, gradients and optimizer state take {quantities.size(each)} on each of {devices} devices, however they "
                              f"are divided, and a device may use {quantities.size(limit)}; give more devices, or move state to the host", True)


def stored_alone(graph: Graph, op: Op, options: Options) -> dict[str, int]:
    """Bytes of a parameter or buffer on one device that has all of it: parameters, gradients, optimizer state that is not on the host."""
    one = Mesh(("device",), (1,))
    parts = stored_parts(op.outputs[0], replicated(one), one, options.optimizer if op.name in trained_params(graph) else None)
    return {**parts, "optimizer": 0} if options.offload == "optimizer" else parts


def searches(whole: Traced, options: Options, clock: PhaseTimer, profile: Cluster) -> Searches:
    """Short searches, of which block prices are made (pipeline/mesh_prices.py)."""
    short, quiet = replace(options, time_limit=options.time_limit / SHORT_STAGES), clock.quiet()

    def table(graph: Graph, on: Mesh, wire: AxisLink | None, flying: int = 1, floor: frozenset[str] | None = None) -> CostTable:
        step = Training(options.optimizer, graph.training, offload=options.offload == "optimizer", wire=wire, in_flight=flying, floor=floor)
        return prices(replace(whole, graph=graph), on, short, clock=quiet, profile=profile, step=step)

    def plan_short(graph: Graph, on: Mesh, wire: AxisLink, flying: int, rate: float) -> Plan:
        with settled_heap(tidy=True):
            priced = table(graph, on, wire, flying)
            if rate:
                return plan_at_rate(priced, replace(short, memory_budget=AMPLE), rate, clock=quiet)
            with quiet("formulate"):  # plans by hand are starts for where little fits; the first greedy plan is there if time is short
                formulation = formulate_within(priced, AMPLE)
                program = with_starts(formulation, short.settings(graph.training, False), (next(iter(greedy_plans(formulation)))[1],))
            return decide(priced, replace(short, memory_budget=AMPLE), clock=quiet, interruptible=False, finer=False, program=program, enough=ENOUGH)

    def run(graph: Graph, on: Mesh, shared: frozenset[str]) -> tuple[float, float]:
        with settled_heap(tidy=True):
            priced = table(graph, on, None, floor=shared)
            with quiet("bounds"):
                return least_run(priced, How(Clock(short.time_limit), options.search))

    def step(graph: Graph, on: Mesh, at: Prices | None, shared: frozenset[str], held: Held | None = None) -> tuple[float, Prices]:
        with settled_heap(tidy=True):
            priced = table(graph, on, None, floor=shared)
            with quiet("bounds"):
                return least_step(priced, How(Clock(short.time_limit), options.search), at, held)

    def stored(op: Op) -> float:
        parts = stored_alone(whole.graph, op, options)
        return float(parts["parameters"] + parts["optimizer"])

    return Searches(plan_short, run, step, stored)
