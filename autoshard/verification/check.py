"""`autoshard.verify`: every rank of a plan's program in one process, against the unsharded model."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch import nn

from autoshard.base.fine_mesh import NEVER
from autoshard.base.mesh import Mesh, mesh_of
from autoshard.base.plan import Plan
from autoshard.base.precision import Precision
from autoshard.decide.arguments import check_arguments, check_called, loaded
from autoshard.decide.options import Options
from autoshard.decide.passed_inputs import as_passed
from autoshard.decide.pipeline_options import Pipeline
from autoshard.errors import UsageError
from autoshard.experts.capacity import EXPERT_CAPACITY
from autoshard.pipeline.pipelined import submesh
from autoshard.planner.finer import finer_meshes
from autoshard.planner.one_stage import prices
from autoshard.runtime.check_plan import check_asked
from autoshard.verification.models.copies import default_dtype
from autoshard.verification.models.subject import Call, Subject, subject_of
from autoshard.verification.optimizers import optimizer_of
from autoshard.verification.plans import Plans, check_names
from autoshard.verification.report import VerifyReport
from autoshard.verification.run import Elsewhere, PlanRun
from autoshard.verification.stage_plans import pipeline_plans

DEFAULT_PLANS = ("searched", "split", "data_parallel", "fully_sharded", "tensor_parallel", "random:0")


def verify(model: nn.Module, mesh: Any, example_inputs: Sequence[Any] = (), example_kwargs: Mapping[str, Any] | None = None, *,
           loss_fn: Callable[..., Any] | None = None, plan: Plan | str | os.PathLike[str] | None = None,
           plans: Sequence[str] = DEFAULT_PLANS, steps: int = 1, training: bool | None = None, optimizer: Any = "momentum",
           tolerance: float | None = None, seeds: Mapping[str, Any] | None = None, cluster: str | None = None,
           memory_budget: str | float | None = None, inputs: str = "global", outputs: str = "auto", fallback: str = "error",
           expert_capacity: float = EXPERT_CAPACITY, pad: str = "weights", refine_axes: str = NEVER, time_limit: float = 60.0, search: str = "auto",
           precision: Precision | None = None, pipeline: Pipeline | None = None, dtype: torch.dtype | None = None, elsewhere: Elsewhere | None = None,
           progress: Callable[[str, str], None] = lambda phase, detail: None) -> VerifyReport:
    """Run plans of `model` with real numbers, all ranks in this process, and compare with the model itself: user outputs,
    every gradient (of the outputs' sum), every buffer, and after `steps` optimizer steps every weight.

    model        real weights (they are copied); with real example inputs as for `autoshard.plan`
    plan         a Plan or its file; without one every kind named in `plans` (see verify/plans.py) is made and run
    optimizer    one that treats every element alike: "momentum", "sgd", "adam" or another name of cost/optimizers.py that says
                 how to verify with it, or a function of the parameters. Adam and its kin divide by the gradient's size: where a
                 gradient is zero but for rounding, weights may differ
    precision    a policy as for `autoshard.plan`; by default that of the given plan. Under a policy, or inside
                 torch.autocast, the model stays in its dtypes
    pipeline     Pipeline(microbatches=4): the program runs micro-batches, the model itself the batch; by default as the given plan. With an axis
                 of stages in the mesh the actions of all ranks are played, over wires that are first in, first out; a mismatch
                 names the stage, the micro-batch and the op
    dtype        what to compute in: by default float64, else (ops without it, a plan that fits no float64 twin) float32
    tolerance    largest error of a tensor over its norm (or, for gradients, over 1e-6 of the norm of all of them); by default
                 1e-9 in float64, and where the program has less precise floats, the rounding measured (see verify/run.py)
    seeds, cluster, memory_budget, fallback, expert_capacity, pad, time_limit, search   as for `autoshard.plan`; a plan that is given is checked
                 against seeds and memory_budget
    refine_axes  plans are made on the mesh with these parts of axes, whether they are cheaper there or not; of "auto" the first that are tried
    inputs       "local": plans are made for inputs that come in split along dim 0 over the first mesh axis
    outputs      as for `autoshard.plan`; numbers are compared whole in any case
    elsewhere    what runs the plans instead (real processes); the program in this process then only finds a wrong op

    One process holds every rank: weights, activations and their whole values. Random ops draw on the ranks what they
    would draw in a run; the model's graph is then run whole with those numbers, and without ranks against torch.

    Raises what planning and lowering raise, UsageError for unusable arguments."""
    arguments = dict(locals())
    check_arguments(arguments)
    check_called(model, example_inputs, example_kwargs)
    if steps < 1:
        raise UsageError(f"steps={steps}: give at least 1")
    if tolerance is not None and not 0 < tolerance < inf:
        raise UsageError(f"tolerance={tolerance!r}: give a positive part of a tensor's norm, such as 1e-6, or leave it out")
    names, mesh, given = check_names(plans), mesh_of(mesh), loaded(plan)
    options = Options.of(arguments, optimizer=Options.optimizer, seeds=seeds or {}, cluster=cluster or "cpu-gloo")
    options = options.filled(given, "seeds", "fallback", "expert_capacity", "pad", "precision", "pipeline")
    if elsewhere is not None and options.pipeline.stages(mesh) > 1:
        raise UsageError(f"mesh {mesh} has a pipeline, which is verified with all ranks in one process: leave out --processes (elsewhere=)")
    call = Call(model, tuple(example_inputs), dict(example_kwargs or {}), loss_fn, training, options,
                torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None, mesh)
    progress("trace", "")
    with torch.autocast("cpu", enabled=False):  # the model alone runs in it
        subject = subject_of(call, given, mesh, dtype)
        make, checks = optimizer_of(optimizer), []
        with default_dtype(subject.dtype):
            for name, chosen in _chosen(subject, given, names, mesh, options, progress):
                progress("run", name)
                checks.append(PlanRun(subject, name, chosen, steps, make, tolerance, elsewhere).check())
    return VerifyReport(tuple(checks), str(mesh), _dtypes(subject), tolerance or (1e-9 if subject.exact else subject.tolerance), steps, subject.notes)


def _dtypes(subject: Subject) -> str:
    """What the comparison ran in."""
    own = str(subject.dtype).removeprefix("torch.")
    return f"{own} and float64" if subject.rounds else own


def _chosen(subject: Subject, given: Plan | None, names: Sequence[str], mesh: Mesh, options: Options,
            progress: Callable[[str, str], None]) -> Iterator[tuple[str, Plan]]:
    if given is not None:
        check_asked(given, subject.traced.graph, options)
        yield "the given plan", replace(given, graph_hash=subject.traced.graph.hash)
        return
    if options.pipeline.stages(mesh) > 1:
        progress("plan", ", ".join(names))
        inputs = as_passed(subject.traced.graph, submesh(mesh, options.pipeline.axis), options.passing)
        yield from pipeline_plans(subject.traced, mesh, options, names, inputs, subject.call.loss_fn is not None)
        return
    progress("costs", "")
    table = prices(subject.traced, next(iter(finer_meshes(subject.traced.graph, mesh, options.refine_axes)), mesh), options)
    plans = Plans(table, options, subject.call.loss_fn is not None)
    for name in names:
        progress("plan", name)
        yield from plans.named((name,))

