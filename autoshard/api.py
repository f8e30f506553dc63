"""The pipeline on one page: model + mesh -> plan (`plan`), and plan -> running module (`compile`)."""
from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autoshard.base.fine_mesh import NEVER
from autoshard.base.mesh import Mesh, mesh_of, mesh_or_any
from autoshard.base.plan import Plan
from autoshard.base.precision import Precision
from autoshard.base.spec import Spec
from autoshard.cost.cluster import load_cluster
from autoshard.decide.arguments import check_arguments, check_called
from autoshard.decide.kept import keep_plan
from autoshard.decide.options import Options, Progress, default_pipeline
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.decide.pipeline_options import AUTO, Pipeline
from autoshard.errors import UsageError
from autoshard.experts.capacity import EXPERT_CAPACITY
from autoshard.pipeline.cutting.cut_points import even_cuts
from autoshard.pipeline.microbatches import batch
from autoshard.planner.open_mesh import asked_for, check_mesh, plan_batch
from autoshard.planner.stages import plan_traced
from autoshard.program.calling import Traced
from autoshard.runtime.cache import cache_folder, planner_key
from autoshard.runtime.compile import Settings, Variant, check_compilable
from autoshard.runtime.module import CompiledModule
from autoshard.runtime.open_choice import closed
from autoshard.runtime.pipeline.module import PipelineModule, pipeline_module
from autoshard.runtime.pipeline.stale import StalePipeline, made_by
from autoshard.runtime.pipeline.variant import PipelineVariant
from autoshard.runtime.ranks.heartbeat import JOIN
from autoshard.runtime.ranks.place import cluster_here, locate
from autoshard.runtime.step import Step
from autoshard.seeds.seeds import names_in, present, with_held


def plan(model: nn.Module, mesh: Any, example_inputs: Sequence[Any] = (), example_kwargs: Mapping[str, Any] | None = None, *,
         loss_fn: Callable | None = None, training: bool | None = None, optimizer: Any = "adamw",
         precision: Precision | None = None, seeds: Mapping[str, Any] | None = None, inputs: str = "global",
         outputs: str | Sequence[str] = "auto", memory_budget: str | float | None = None, cluster: str | None = None,
         time_limit: float = 60.0, search: str = "auto", fallback: str = "error", offload: str = "none",
         expert_capacity: float = EXPERT_CAPACITY, pad: str = "weights", refine_axes: str = NEVER, pipeline: Pipeline | None = None,
         thorough: bool = False, progress: Progress | None = None, model_info: Mapping[str, Any] | None = None) -> Plan:
    """Find the cheapest plan that fits. No process group, no GPU, no real weights.

    mesh           "dp=2,tp=4", an autoshard Mesh or a torch DeviceMesh; 64 or "auto:64": any mesh of 64 devices, with or without pipeline stages
                   and micro-batches (see docs/pipeline.md); `plan.mesh` is the one that was chosen
    example_inputs the positional inputs (real, fake or meta tensors); with `loss_fn` the last one is the
                   target and the graph computes loss_fn(model(*inputs[:-1]), target)
    training       None: with gradients when grad mode is on and some parameter is trainable
    optimizer      "adamw", "sgd", "none" or another name of cost/optimizers.py (`autoshard plan --help` lists them); or a class
                   or an object of torch.optim that is there
    precision      Precision(param=, master=, reduce=), each of "bf16", "fp16", "fp32", "fp64"; None: the model's own dtypes
    inputs         "global": every rank gets the whole batch; "local": each gets its own part
    outputs        "replicate": whole on every rank; "dtensor", "local": as the plan splits them; "auto": whole, but what a model returns beside
                   the loss that it is trained with, of 16 MiB and more (logits), is a DTensor, so that nobody waits for what nobody
                   reads; a note of the plan names it. One for all outputs, or one for each: ("replicate", "dtensor")
    seeds          see seeds/seeds.py; `memory_budget` per rank ("70GiB"), default: the cluster's capacity
    cluster        a profile's name or file; default "h100-dgx", or "cpu-gloo" for a DeviceMesh of CPUs
    time_limit     seconds of wall clock for the phase "search" (see docs/search.md), after tracing and pricing; the best plan so far
                   is returned with its gap. Ctrl-C there does the same: the plan's `interrupted` is True
    search         backend of the search: "auto", "milp", "cp_sat", "local", "brute"; or "propagate": spread the seeds, search nothing
    fallback       "replicate": submodules that cannot be traced run whole on every rank, and the report says what that costs;
                   "error": a TraceError lists all places that cannot be traced
    offload        "none"; "optimizer": the optimizer's state of a parameter may lie in the host's memory, where that pays and the profile has a
                   host_link; step with `autoshard.local_update(optimizer)` then
    expert_capacity rows of tokens that a rank has room for where experts are split and tokens travel, over those of an even load; a CapacityError
                   above it (docs/experts.md)
    pad            what is padded where it does not divide: "weights" (vocabularies, hidden features; small pads), or "all": any dim of a weight,
                   attention heads and rows of the batch too, whose pads are computed (docs/padding.md)
    refine_axes    "never"; "tp=4x2": inside of the program the axis tp=8 may be 4 times 2, where heads divide by 4 only; "auto": parts by the model's
                   heads. The plan is the cheaper of that and the one without; both are searched within the time limit (docs/formulate.md)
    pipeline       Pipeline(microbatches=4): the batch in so many parts, see docs/pipeline.md; Pipeline(...) also names stages. With
                   Pipeline(microbatches="auto") their number is searched, as it is on a mesh "auto:64" without `pipeline`
    thorough       where the mesh is chosen: meshes of three axes too, and shapes that can gain little. Without it, of more than 8 devices,
                   shapes that bounds leave at most 5 % of a step to gain are not searched, so that the gap may be as much (docs/pipeline.md)
    progress       called with (phase, detail)

    Raises TraceError, SeedError, MeshError, ClusterError, UsageError, InfeasibleError; Interrupted (also a KeyboardInterrupt) on
    Ctrl-C before there is a plan."""
    given = dict(locals())
    check_arguments(given)
    mesh, options, profile = asked_for(given, mesh)
    check_called(model, example_inputs, example_kwargs)
    asked = batch.Batch(model, tuple(example_inputs), dict(example_kwargs or {}), options.tracing(loss_fn, training))
    return plan_batch(asked, mesh, options, clock=PhaseTimer(progress), profile=profile, has_loss=loss_fn is not None, model_info=model_info)


def compile(model: nn.Module, mesh: Any, example_inputs: Sequence[Any] | None = None, example_kwargs: Mapping[str, Any] | None = None, *,
            loss_fn: Callable | None = None, training: bool | None = None, optimizer: Any = "adamw", precision: Precision | None = None,
            seeds: Mapping[str, Any] | None = None, inputs: str = "global", outputs: str | Sequence[str] = "auto",
            batch_axes: Sequence[str] = (), memory_budget: str | float | None = None, cluster: str | None = None, time_limit: float = 60.0,
            search: str = "auto", fallback: str = "error", offload: str = "none", expert_capacity: float = EXPERT_CAPACITY,
            pad: str = "weights", refine_axes: str = NEVER, pipeline: Pipeline | None = None, thorough: bool = False,
            plan: Plan | str | os.PathLike[str] | None = None, backend: str = "eager", cache: bool | str | os.PathLike[str] = True,
            checkpoint: str | None = None, device: Any = None, join_timeout: float = JOIN, check_inputs: str = "first", variants: int = 32,
            keep_within: float = 0.1, progress: Progress | None = None) -> CompiledModule:
    """The model, sharded over `mesh` by the cheapest plan: an nn.Module with DTensor parameters under the same names.

    Options are those of `plan`, and
    mesh           4 or "auto:4": as many processes run, and the mesh is chosen for `example_inputs`; `compiled.plan.mesh` is it
    example_inputs plan now, for these; without them the model is planned at its first call
    cluster        default: that of the devices which run it: "h100-dgx" for GPUs, "cpu-gloo" for CPUs, "cpu-gloo:shared" for those of one machine
    batch_axes     with inputs="local": mesh axes that split dim 0 of every input (default: the first)
    backend        what runs the local graphs: "eager" or "inductor"
    plan           a Plan or its file, replayed instead of searched; it is checked against seeds and memory_budget where these are given too
    cache          keep plans on disk; True for the default folder, or a folder
    checkpoint     folder of a torch.distributed.checkpoint to fill a meta model from
    join_timeout   seconds to wait for ranks that have not called this; then an AutoshardError names them
    inputs         "global": every rank passes the same whole batch; "local": its own piece of it, as a loader with DistributedSampler gives
    check_inputs   when ranks compare the numbers of their inputs: "first" (calls 1, 2, 3, 5, 9, ... of a variant), "always", "never"
    variants       how many variants of the call (shapes, modes) are kept, those used last
    keep_within    new shapes keep a plan estimated at most this share dearer than a search would find (docs/new-shapes.md); 0: search

    One rank searches, the others receive its plan. Raises MeshError, UsageError, PlanError, and what `plan` raises where it plans."""
    check_arguments(given := dict(locals()))
    options = Options.of(given, seeds=with_held(model, seeds), cluster=cluster or cluster_here(mesh, device), cache=cache_folder(cache),
                         pipeline=pipeline or default_pipeline(mesh))
    profile = load_cluster(options.cluster)
    check_mesh(mesh_or_any(mesh), options, profile)
    if example_inputs is not None:
        check_called(model, example_inputs, example_kwargs)
    options.check_offload(profile, True)  # variants for inference have no state, and need none
    (mesh, options, chosen), known = closed(mesh, options, profile, given), names_in(model)

    def planner(traced: Traced, mesh: Mesh, *, stored: Mapping[str, Spec], inputs: Mapping[str, Spec], pipeline: Pipeline | None = None) -> Plan:
        asked = replace(options, pipeline=pipeline or options.pipeline, seeds=present(options.seeds, traced.graph, known, bool(stored)))
        return plan_traced(traced, mesh, asked, clock=PhaseTimer(progress), has_loss=loss_fn is not None, fixed={**stored, **inputs},
                           profile=profile, interruptible=False)  # who stops a training script wants it to end

    def build(variant: Variant) -> Step:  # at the first call of every variant: with or without gradients, other shapes
        plan = variant.agreed_plan(planner)
        if isinstance(variant, PipelineVariant):
            return variant.assemble(plan)
        order = variant.schedule(plan)
        return variant.bind(plan, variant.lower(plan, order))

    check_compilable(model, mesh_of(mesh), options)
    filled = options.filled(chosen, "seeds", "fallback", "expert_capacity", "pad", "refine_axes", "pipeline")
    settings = Settings(build, filled, loss_fn, chosen, planner_key(options, profile),
                        partial(keep_plan, options, profile) if keep_within > 0 else None)
    many = options.pipeline.stages(mesh_of(mesh)) > 1
    made = partial(pipeline_module, has_inputs=example_inputs is not None) if many else CompiledModule
    compiled = made(model, locate(mesh, device, join_timeout), settings)
    if example_inputs is not None:
        with torch.set_grad_enabled(torch.is_grad_enabled() and model.training if training is None else training):
            compiled.prepare(*example_inputs, **dict(example_kwargs or {}))
    return compiled


def stale_pipeline(model: nn.Module, mesh: Any, example_inputs: Sequence[Any], *, loss_fn: Callable | None = None,
                   optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer], cuts: Any = AUTO, axis: str = "pp",
                   **options: Any) -> StalePipeline:
    """PipeDream's pipeline with weight stashing. **It computes other numbers than training on one device**: the optimizer runs inside the schedule,
    and gradients are of weights that are up to stages - 1 updates old (docs/pipeline.md#stale-weights). Nothing chooses it but this call.

    mesh           with the pipeline's axis first: "pp=4", "pp=2,dp=2"
    example_inputs one mini-batch; with `loss_fn` the last one is the target
    optimizer      makes this rank's optimizer: lambda params: torch.optim.SGD(params, lr=0.1)
    cuts           modules at which stages begin; "auto": the slowest stage is as fast as can be, by the seconds of the blocks on one device
    options        further ones of `compile`, but for `pipeline`

        stale = autoshard.stale_pipeline(model, "pp=2", (x, target), loss_fn=loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        losses = stale.train(loader)       # loader has a length; every rank passes the same batches
        stale.module.state_dict()

    Raises UsageError for tied weights, and what `compile` raises."""
    if refused := sorted({"pipeline", "training", "plan"} & options.keys()):
        raise UsageError(f"{refused[0]}= has no meaning in a stale pipeline: it has one schedule, 1F1B, and trains; leave it out")
    asked = mesh_or_any(mesh)
    if not isinstance(asked, Mesh) or Pipeline(axis=axis).stages(asked) < 2:
        raise UsageError(f"mesh {mesh}: a stale pipeline is never chosen, so its stages are given: a mesh with the axis {axis!r} first, '{axis}=2'")
    pipeline = Pipeline(1, "1f1b", cuts, axis=axis)
    probe = made_by(optimizer, [nn.Parameter(torch.zeros(1))])  # what kind it is decides memory and seconds of an update
    if cuts == AUTO:
        cluster = load_cluster(options.get("cluster") or cluster_here(mesh, options.get("device")))
        check_called(model, example_inputs, None)
        traced = batch.Batch(model, tuple(example_inputs), {}, Options.of({**options, "pipeline": pipeline}).tracing(loss_fn, True)).cut(pipeline)
        pipeline = replace(pipeline, cuts=even_cuts(traced.graph, cluster, pipeline.stages(asked)))
    compiled = compile(model, mesh, example_inputs, loss_fn=loss_fn, training=True, optimizer=probe, pipeline=pipeline, **options)
    assert isinstance(compiled, PipelineModule), "a mesh with the pipeline's axis has stages"
    return StalePipeline(compiled, optimizer)
