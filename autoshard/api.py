"""The pipeline on one page: model + mesh -> plan (`plan`), and plan -> running module (`compile`)."""
from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autoshard.base.graph import Graph
from autoshard.base.mesh import AnyMesh, Mesh, mesh_of, mesh_or_any
from autoshard.base.plan import Plan
from autoshard.base.precision import Precision
from autoshard.base.spec import Spec
from autoshard.cost.budget import Budget
from autoshard.cost.cluster import AxisLink, Cluster, load_cluster
from autoshard.decide.arguments import check_arguments, check_called, loaded
from autoshard.decide.backends import find
from autoshard.decide.how import How
from autoshard.decide.kept import Known, kept
from autoshard.decide.least_seconds import least_seconds
from autoshard.decide.options import Options, Progress, default_cluster, default_pipeline, planned_under
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.decide.pipeline_options import AUTO, Pipeline
from autoshard.decide.program import formulate_within, with_starts
from autoshard.errors import UsageError
from autoshard.formulate.problem_of import Formulation
from autoshard.pipeline.merge import merged
from autoshard.pipeline.microbatches import batch
from autoshard.pipeline.pipelined import pipelined, submesh
from autoshard.pipeline.plan_stages import ALL, Room, plan_stages
from autoshard.pipeline.shapes.choose import AMPLE, Asked, choose
from autoshard.pipeline.shapes.cut_search import SHORT_STAGES, choices, search_cuts
from autoshard.pipeline.shapes.mesh_prices import Searches
from autoshard.program.calling import Traced
from autoshard.runtime.cache import cache_folder, cached, key_of, planner_key
from autoshard.runtime.compile import Settings, Variant, check_compilable
from autoshard.runtime.module import CompiledModule
from autoshard.runtime.pipeline.module import pipeline_module
from autoshard.runtime.pipeline.variant import PipelineVariant
from autoshard.runtime.ranks.agree import share
from autoshard.runtime.ranks.heartbeat import JOIN
from autoshard.runtime.ranks.place import locate
from autoshard.runtime.step import Step
from autoshard.search import Clock
from autoshard.search.interrupt import stopping
from autoshard.seeds.held import holding
from autoshard.seeds.seeds import resolve_seeds, with_held
from autoshard.space.cost_table import CostTable, Training, build_cost_table
from autoshard.space.reachable import reachable
from autoshard.space.strategies import enumerate_strategies


def plan(model: nn.Module, mesh: Any, example_inputs: Sequence[Any] = (), example_kwargs: Mapping[str, Any] | None = None, *,
         loss_fn: Callable | None = None, training: bool | None = None, optimizer: Any = "adamw",
         precision: Precision | None = None, seeds: Mapping[str, Any] | None = None, inputs: str = "global",
         outputs: str = "replicate", memory_budget: str | float | None = None, cluster: str | None = None,
         time_limit: float = 60.0, search: str = "auto", fallback: str = "error", offload: str = "none",
         pipeline: Pipeline | None = None, progress: Progress | None = None, model_info: Mapping[str, Any] | None = None) -> Plan:
    """Find the cheapest plan that fits. No process group, no GPU, no real weights.

    mesh           "dp=2,tp=4", an autoshard Mesh or a torch DeviceMesh; "auto:64": any mesh of 64 devices, with or without pipeline stages and
                   micro-batches (see docs/pipeline.md); `plan.mesh` is the one that was chosen
    example_inputs the positional inputs (real, fake or meta tensors); with `loss_fn` the last one is the
                   target and the graph computes loss_fn(model(*inputs[:-1]), target)
    training       None: with gradients when grad mode is on and some parameter is trainable
    optimizer      "adamw", "sgd", "none" or another name of cost/optimizers.py (`autoshard plan --help` lists them); or a class
                   or an object of torch.optim that is there
    precision      Precision(param=, master=, reduce=), each of "bf16", "fp16", "fp32", "fp64"; None: the model's own dtypes
    inputs         "global": every rank gets the whole batch; "local": each gets its own part
    outputs        "replicate": whole on every rank; "dtensor", "local": as the plan splits them
    seeds          see seeds/seeds.py; `memory_budget` per rank ("70GiB"), default: the cluster's capacity
    cluster        a profile's name or file; default "cpu-gloo" for a DeviceMesh of CPUs, else "h100-dgx"
    time_limit     seconds of wall clock for the phase "search" (see docs/search.md), after tracing and pricing; the best plan so far
                   is returned with its gap. Ctrl-C there does the same: the plan's `interrupted` is True
    search         backend of the search: "auto", "milp", "cp_sat", "local", "brute"; or "propagate": spread the seeds, search nothing
    fallback       "replicate": submodules that cannot be traced run whole on every rank, and the report says what that costs;
                   "error": a TraceError lists all places that cannot be traced
    offload        "none"; "optimizer": the optimizer's state of a parameter may lie in the host's memory, where that pays and the profile has a
                   host_link; step with `autoshard.local_update(optimizer)` then
    pipeline       Pipeline(microbatches=4): the batch in so many parts, see docs/pipeline.md; Pipeline(...) also names stages. With
                   Pipeline(microbatches="auto") their number is searched, as it is on a mesh "auto:64" without `pipeline`
    progress       called with (phase, detail)

    Raises TraceError, SeedError, MeshError, ClusterError, UsageError, InfeasibleError; Interrupted (also a KeyboardInterrupt) on
    Ctrl-C before there is a plan."""
    given = dict(locals())
    check_arguments(given)
    options = Options.of(given, seeds=with_held(model, seeds), cluster=cluster or default_cluster(mesh), pipeline=pipeline or default_pipeline(mesh))
    mesh, profile = mesh_or_any(mesh), load_cluster(options.cluster)
    check_mesh(mesh, options, profile)  # a bad cluster or mesh is reported before the long work
    options.check_offload(profile, training is not False)
    check_called(model, example_inputs, example_kwargs)
    asked = batch.Batch(model, tuple(example_inputs), dict(example_kwargs or {}), options.tracing(loss_fn, training))
    return plan_batch(asked, mesh, options, clock=PhaseTimer(progress), has_loss=loss_fn is not None, model_info=model_info)


def compile(model: nn.Module, mesh: Any, example_inputs: Sequence[Any] | None = None, example_kwargs: Mapping[str, Any] | None = None, *,
            loss_fn: Callable | None = None, training: bool | None = None, optimizer: Any = "adamw", precision: Precision | None = None,
            seeds: Mapping[str, Any] | None = None, inputs: str = "global", outputs: str = "replicate", batch_axes: Sequence[str] = (),
            memory_budget: str | float | None = None, cluster: str | None = None, time_limit: float = 60.0, search: str = "auto",
            fallback: str = "error", offload: str = "none", pipeline: Pipeline | None = None, plan: Plan | str | os.PathLike[str] | None = None,
            backend: str = "eager", cache: bool | str | os.PathLike[str] = True, checkpoint: str | None = None, device: Any = None,
            join_timeout: float = JOIN, check_inputs: str = "first", variants: int = 32, keep_within: float = 0.1,
            progress: Progress | None = None) -> CompiledModule:
    """The model, sharded over `mesh` by the cheapest plan: an nn.Module with DTensor parameters under the same names.

    Options are those of `plan`, and
    mesh           "auto:4": as many processes run, and the mesh is chosen for `example_inputs`; `compiled.plan.mesh` is it
    example_inputs plan now, for these; without them the model is planned at its first call
    batch_axes     with inputs="local": mesh axes that split dim 0 of every input (default: the first)
    backend        what runs the local graphs: "eager" or "inductor"
    plan           a Plan or its file, replayed instead of searched
    cache          keep plans on disk; True for the default folder, or a folder
    checkpoint     folder of a torch.distributed.checkpoint to fill a meta model from
    join_timeout   seconds to wait for ranks that have not called this; then an AutoshardError names them
    inputs         "global": every rank passes the same whole batch; "local": its own piece of it, as a loader with DistributedSampler gives
    check_inputs   when ranks compare the numbers of their inputs: "first" (calls 1, 2, 3, 5, 9, ... of a variant), "always", "never"
    variants       how many variants of the call (shapes, modes) are kept, those used last
    keep_within    new shapes keep a plan estimated at most this share dearer than a search would find (docs/new-shapes.md); 0: search

    One rank searches, the others receive its plan. Raises MeshError, UsageError, PlanError; with example_inputs
    (else at the first call) also what `plan` raises."""
    check_arguments(given := dict(locals()))
    options = Options.of(given, seeds=with_held(model, seeds), cluster=cluster or default_cluster(mesh), cache=cache_folder(cache),
                         pipeline=pipeline or default_pipeline(mesh))
    profile = load_cluster(options.cluster)
    check_mesh(mesh_or_any(mesh), options, profile)
    if example_inputs is not None:
        check_called(model, example_inputs, example_kwargs)
    options.check_offload(profile, True)  # variants for inference have no state, and need none
    mesh, options, chosen = _closed(mesh, options, profile, given)

    def planner(traced: Traced, mesh: Mesh, *, stored: Mapping[str, Spec], inputs: Mapping[str, Spec], pipeline: Pipeline | None = None) -> Plan:
        asked = replace(options, pipeline=pipeline or options.pipeline)
        return plan_traced(traced, mesh, asked, clock=PhaseTimer(progress), has_loss=loss_fn is not None, fixed={**stored, **inputs},
                           profile=profile, interruptible=False)  # who stops a training script wants it to end

    def build(variant: Variant) -> Step:  # at the first call of every variant: with or without gradients, other shapes
        plan = variant.agreed_plan(planner)
        if isinstance(variant, PipelineVariant):
            return variant.assemble(plan)
        order = variant.schedule(plan)
        return variant.bind(plan, variant.lower(plan, order))

    check_compilable(model, mesh_of(mesh), options)
    settings = Settings(build, options.filled(chosen, "seeds", "fallback", "pipeline"), loss_fn, chosen, planner_key(options, profile),
                        partial(keep_plan, options, profile) if keep_within > 0 else None)
    many = options.pipeline.stages(mesh_of(mesh)) > 1
    made = partial(pipeline_module, has_inputs=example_inputs is not None) if many else CompiledModule
    compiled = made(model, locate(mesh, device, join_timeout), settings)
    if example_inputs is not None:
        with torch.set_grad_enabled(torch.is_grad_enabled() and model.training if training is None else training):
            compiled.prepare(*example_inputs, **dict(example_kwargs or {}))
    return compiled


def _closed(mesh: Any, options: Options, profile: Cluster, given: Mapping[str, Any]) -> tuple[Any, Options, Plan | None]:
    """Mesh, options and plan with nothing left open. `given`: the arguments of `compile`."""
    wanted, plan = mesh_or_any(mesh), loaded(given["plan"])
    if not is_open(wanted, options):
        return mesh, options, plan
    plan = plan or _agreed_choice(wanted, options, profile, given)
    return plan.mesh if isinstance(wanted, AnyMesh) else mesh, replace(options, pipeline=planned_under(plan)["pipeline"]), plan


def _agreed_choice(mesh: Mesh | AnyMesh, options: Options, profile: Cluster, given: Mapping[str, Any]) -> Plan:
    """The plan that one rank chooses for all, where mesh or micro-batches are open; from the cache where it is there."""
    model, loss_fn, training = given["model"], given["loss_fn"], given["training"]
    if given["example_inputs"] is None:
        what = f"the mesh {mesh}" if isinstance(mesh, AnyMesh) else "microbatches='auto'"
        raise UsageError(f"{what} is chosen for a batch: pass example_inputs to compile")
    place = locate(Mesh(("devices",), (mesh.size,)) if isinstance(mesh, AnyMesh) else given["mesh"], given["device"], given["join_timeout"])
    asked = batch.Batch(model, tuple(given["example_inputs"]), dict(given["example_kwargs"] or {}), options.tracing(loss_fn, training))

    def search() -> Plan:
        return plan_batch(asked, mesh, options, clock=PhaseTimer(given["progress"]), has_loss=loss_fn is not None, interruptible=False)

    def text() -> str:
        key = key_of(asked.whole.graph.hash, str(mesh), planner_key(options, profile))
        return cached(options.running.cache, key, search).to_json()

    with torch.set_grad_enabled(torch.is_grad_enabled() and model.training if training is None else training):
        return Plan.from_json(share(place, {"mesh": str(mesh), "options": options.text}, text, options.running.timeout))


def is_open(mesh: Mesh | AnyMesh, options: Options) -> bool:
    """Whether the mesh, or the number of micro-batches, is to be chosen."""
    return isinstance(mesh, AnyMesh) or options.pipeline.microbatches == AUTO


def check_mesh(mesh: Mesh | AnyMesh, options: Options, profile: Cluster) -> None:
    """Raises ClusterError for more devices than the cluster has, and UsageError for stages that the mesh has not."""
    profile.links_for(Mesh(("devices",), (mesh.size,)) if isinstance(mesh, AnyMesh) else mesh)
    if isinstance(mesh, Mesh):
        options.pipeline.stages(mesh)


def plan_batch(asked: batch.Batch, mesh: Mesh | AnyMesh, options: Options, *, clock: PhaseTimer, **how: Any) -> Plan:
    """Trace, and plan; where mesh or micro-batches are open, choose them."""
    profile = load_cluster(options.cluster)
    if is_open(mesh, options):
        return plan_open(asked, mesh, options, clock, profile, **how)
    with clock("trace"):
        traced = asked.cut(options.pipeline)
    options.check_offload(profile, traced.graph.training)
    return plan_traced(traced, mesh_of(mesh), options, clock=clock, profile=profile, **how)


def plan_open(asked: batch.Batch, mesh: Mesh | AnyMesh, options: Options, clock: PhaseTimer, profile: Cluster, **how: Any) -> Plan:
    """Choose what is open of mesh, micro-batches, schedule and cuts, and plan it."""
    wanted = Asked(mesh.size, mesh if isinstance(mesh, Mesh) else None, options.pipeline, profile, options.memory_limit(profile))
    with clock("trace"):
        whole = asked.whole
    options.check_offload(profile, whole.graph.training)

    def plan_shape(on: Mesh, pipeline: Pipeline) -> Plan:
        with clock("trace"):
            traced = asked.cut(pipeline)
        return plan_traced(traced, on, replace(options, pipeline=pipeline), clock=clock, profile=profile, **how)

    found = choose(asked, wanted, searches(whole, options, clock, profile), plan_shape)
    return replace(found, timings=dict(clock.seconds))


def searches(whole: Traced, options: Options, clock: PhaseTimer, profile: Cluster) -> Searches:
    """Short searches, of which block prices are made (pipeline/mesh_prices.py)."""
    short = replace(options, time_limit=options.time_limit / SHORT_STAGES)

    def table(graph: Graph, on: Mesh, wire: AxisLink | None, flying: int = 1) -> CostTable:
        step = Training(options.optimizer, graph.training, offload=options.offload == "optimizer", wire=wire, in_flight=flying)
        return prices(replace(whole, graph=graph), on, short, clock=clock, profile=profile, step=step)

    def plan_short(graph: Graph, on: Mesh, wire: AxisLink, flying: int, within: float) -> Plan:
        return decide(table(graph, on, wire, flying), replace(short, memory_budget=min(within, AMPLE)), clock=clock, interruptible=False)

    def least(graph: Graph, on: Mesh) -> tuple[float, float]:
        priced = table(graph, on, None)
        with clock("bounds"):
            return least_seconds(priced, How(Clock(short.time_limit), options.search))

    return Searches(plan_short, least)


def keep_plan(options: Options, profile: Cluster, plans: Sequence[Plan], known: Sequence[Known], graph: Graph, mesh: Mesh) -> Plan | None:
    """Of `plans`, made for other shapes, the one to run `graph` with, priced anew; None: search. See decide/kept.py."""
    budget = Budget.of(profile.device, options.memory_limit(profile))
    return kept(plans, known, graph, mesh, profile, Training(options.optimizer, graph.training), budget, options.running.keep_within)


def plan_traced(traced: Traced, mesh: Mesh, options: Options, *, clock: PhaseTimer | None = None, has_loss: bool = False,
                model_info: Mapping[str, Any] | None = None, fixed: Mapping[str, Spec] | None = None,
                profile: Cluster | None = None, interruptible: bool = True) -> Plan:
    """The search half of the pipeline, for a graph that is traced already. `fixed` placements of parameters,
    buffers and inputs by name come before seeds: that is how they are held already. `profile`: what `options.cluster` held
    when it was read; without it, it is read now."""
    clock = clock or PhaseTimer()
    if options.pipeline.stages(mesh) > 1:
        return plan_pipeline(traced, mesh, options, clock, fixed or {}, profile or load_cluster(options.cluster), has_loss=has_loss,
                             model_info=model_info, interruptible=interruptible)
    return decide(prices(traced, mesh, options, clock=clock, fixed=fixed, profile=profile), options, clock=clock, has_loss=has_loss,
                  model_info=model_info, interruptible=interruptible)


def plan_pipeline(traced: Traced, mesh: Mesh, options: Options, clock: PhaseTimer, fixed: Mapping[str, Spec], profile: Cluster,
                  **how: Any) -> Plan:
    """Cut the graph, plan every stage on its submesh, and put the plans together."""
    resolve_seeds(traced.graph, submesh(mesh, options.pipeline.axis), options.seeds)  # what matches nothing at all
    stages, wire = submesh(mesh, options.pipeline.axis), profile.links_for(mesh)[0]

    def plan_stage(graph: Graph, fixed: Mapping[str, Spec], in_flight: int, room: Room = ALL, within: Options = options) -> Plan:
        step = Training(options.optimizer, graph.training, offload=options.offload == "optimizer", wire=wire, in_flight=in_flight, duty=room.duty)
        within = within if room.share == 1.0 else replace(within, memory_budget=room.share * within.memory_limit(profile))
        table = prices(replace(traced, graph=graph), stages, within, clock=clock, fixed=fixed, profile=profile, step=step)
        return decide(table, within, clock=clock, **how)

    def plan_with(choice: Pipeline) -> Plan:
        with clock("cut"):
            made = pipelined(traced.graph, mesh, choice, profile)
        return merged(made, plan_stages(made, fixed, plan_stage), wire)

    short = partial(plan_stage, within=replace(options, time_limit=options.time_limit / SHORT_STAGES))
    return search_cuts(choices(traced.graph, options.pipeline.stages(mesh), options.pipeline, short, profile, wire, options.memory_limit(profile)),
                    plan_with)


def prices(traced: Traced, mesh: Mesh, options: Options, *, clock: PhaseTimer | None = None, fixed: Mapping[str, Spec] | None = None,
           profile: Cluster | None = None, step: Training | None = None) -> CostTable:
    """What every strategy and every change of layout costs; explaining and comparing plans start from here too. `step`: of a stage of a
    pipeline, what a step does besides the graph. Raises UsageError for a mesh with an axis of stages: each of them has prices of its own."""
    if step is None and options.pipeline.stages(mesh) > 1:
        raise UsageError(f"this looks at the program of one stage, and axis {options.pipeline.axis!r} of mesh {mesh} cuts the model into several; "
                         "leave that axis out of the mesh here (`autoshard plan` and `autoshard verify` take it)")
    graph, profile, clock = traced.graph, profile or load_cluster(options.cluster), clock or PhaseTimer()
    with clock("strategies"):
        seeds = holding(resolve_seeds(graph, mesh, options.seeds, stage=step is not None), graph, fixed or {})
        strategies = reachable(graph, enumerate_strategies(graph, mesh, seeds, outputs=options.passing.outputs))
    with clock("costs"):
        step = step or Training(options.optimizer, graph.training, offload=options.offload == "optimizer")
        return replace(build_cost_table(graph, mesh, profile, strategies, step), seeds=seeds)


def decide(table: CostTable, options: Options, *, clock: PhaseTimer | None = None, has_loss: bool = False,
           model_info: Mapping[str, Any] | None = None, formulation: Formulation | None = None, interruptible: bool = True) -> Plan:
    """Formulate, search, and read the plan from the solution. In training, where the best plan with ample memory does not
    fit, the search also decides what backward recomputes instead of keeping it. `interruptible`: Ctrl-C ends the search with the
    best plan so far, whose status says so. Raises InfeasibleError, and Interrupted where there is no plan yet."""
    clock, settings = clock or PhaseTimer(), options.settings(table.graph.training, has_loss)
    with clock("formulate"):
        formulation = formulation or formulate_within(table, options.memory_limit(table.cluster))
        program = with_starts(formulation, settings)
    how = How(Clock(options.time_limit), options.search, clock.search)
    with stopping(how.clock, interruptible), clock("search"):
        found = find(program, how)
    with clock("assemble"):
        plan = found.plan(table, model_info or {}, options.marks)
    return replace(plan, timings=dict(clock.seconds))
