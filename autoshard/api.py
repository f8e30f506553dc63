"""The pipeline on one page: model + mesh -> plan (`plan`), and plan -> running module (`compile`)."""
from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from autoshard.base.graph import Graph
from autoshard.base.mesh import Mesh, mesh_of
from autoshard.base.plan import Plan
from autoshard.base.precision import Precision
from autoshard.base.spec import Spec
from autoshard.cost.cluster import Cluster, load_cluster
from autoshard.decide.arguments import check_arguments, check_called
from autoshard.decide.attempts import Programs, asked_of, formulated, searched
from autoshard.decide.fit import cpu_seconds
from autoshard.decide.make_plan import make_plan
from autoshard.decide.opaque_notes import whole_notes
from autoshard.decide.options import PROPAGATE, Options, Progress, parse_bytes
from autoshard.decide.walks.propagate import propagate, taken
from autoshard.errors import Interrupted
from autoshard.formulate.problem_of import Formulation
from autoshard.program.calling import Traced
from autoshard.program.simplify import simplify
from autoshard.program.trace import trace
from autoshard.rules.factors import factor_graph
from autoshard.runtime.cache import planner_key
from autoshard.runtime.entry import compile_model
from autoshard.runtime.module import CompiledModule
from autoshard.runtime.ranks.heartbeat import JOIN
from autoshard.search import Clock as SearchClock
from autoshard.search.interrupt import stopping
from autoshard.seeds.grammar import seed_text
from autoshard.seeds.marks import marks, was_given
from autoshard.seeds.seeds import Seeds, resolve_seeds, with_held
from autoshard.space.cost_table import CostTable, Training, build_cost_table
from autoshard.space.reachable import reachable
from autoshard.space.strategies import enumerate_strategies


def plan(model: nn.Module, mesh: Any, example_inputs: Sequence[Any] = (), example_kwargs: Mapping[str, Any] | None = None, *,
         loss_fn: Callable | None = None, training: bool | None = None, optimizer: Any = "adamw",
         precision: Precision | None = None, seeds: Mapping[str, Any] | None = None, inputs: str = "global",
         outputs: str = "replicate", memory_budget: str | float | None = None, cluster: str | None = None,
         time_limit: float = 60.0, search: str = "auto", fallback: str = "error", offload: str = "none",
         progress: Progress | None = None, model_info: Mapping[str, Any] | None = None) -> Plan:
    """Find the cheapest plan that fits. No process group, no GPU, no real weights.

    mesh           "dp=2,tp=4", an autoshard Mesh or a torch DeviceMesh
    example_inputs the positional inputs (real, fake or meta tensors); with `loss_fn` the last one is the
                   target and the graph computes loss_fn(model(*inputs[:-1]), target)
    training       None: with gradients when grad mode is on and some parameter is trainable
    optimizer      "adamw", "adam", "sgd", "momentum", "nadam", "radam", "adamax", "rmsprop", "adagrad", "adafactor", "adamw8bit",
                   "adam8bit", "none", or a torch.optim class of one of these names
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
    progress       called with (phase, detail)

    Raises TraceError, SeedError, MeshError, ClusterError, UsageError, InfeasibleError; Interrupted (also a KeyboardInterrupt) on
    Ctrl-C before there is a plan."""
    check_arguments(model, example_inputs, example_kwargs=example_kwargs, loss_fn=loss_fn, training=training, precision=precision, seeds=seeds,
                    cluster=cluster, memory_budget=memory_budget, time_limit=time_limit, progress=progress)
    options = Options(optimizer_name(optimizer), precision, with_held(model, seeds), inputs, outputs,
                      parse_bytes(memory_budget), cluster or default_cluster(mesh), time_limit, search, fallback, offload)
    mesh, clock = as_mesh(mesh), Clock(progress)
    profile = load_cluster(options.cluster)
    profile.links_for(mesh)  # a bad cluster or mesh is reported before the long work
    options.check_offload(profile, training is not False)
    check_called(model, example_inputs, example_kwargs)
    with clock("trace"):
        traced = trace(model, tuple(example_inputs), dict(example_kwargs or {}), loss_fn=loss_fn,
                       training=training, precision=precision, marks=options.marks, fallback=fallback)
    options.check_offload(profile, traced.graph.training)
    return plan_traced(traced, mesh, options, clock=clock, has_loss=loss_fn is not None, model_info=model_info)


def compile(model: nn.Module, mesh: Any, example_inputs: Sequence[Any] | None = None,
            example_kwargs: Mapping[str, Any] | None = None, *, loss_fn: Callable | None = None,
            training: bool | None = None, optimizer: Any = "adamw", precision: Precision | None = None,
            seeds: Mapping[str, Any] | None = None, inputs: str = "global", outputs: str = "replicate",
            batch_axes: Sequence[str] = (), memory_budget: str | float | None = None, cluster: str | None = None,
            time_limit: float = 60.0, search: str = "auto", fallback: str = "error", offload: str = "none",
            plan: Plan | str | os.PathLike[str] | None = None, backend: str = "eager",
            cache: bool | str | os.PathLike[str] = True, checkpoint: str | None = None, device: Any = None, join_timeout: float = JOIN,
            check_inputs: str = "first", progress: Progress | None = None) -> CompiledModule:
    """The model, sharded over `mesh` by the cheapest plan: an nn.Module with DTensor parameters under the same names.

    Options are those of `plan`, and
    example_inputs plan now, for these; without them the model is planned at its first call
    batch_axes     with inputs="local": mesh axes that split dim 0 of every input (default: the first)
    backend        what runs the local graphs: "eager" or "inductor"
    plan           a Plan or its file, replayed instead of searched
    cache          keep plans on disk; True for the default folder, or a folder
    checkpoint     folder of a torch.distributed.checkpoint to fill a meta model from
    join_timeout   seconds to wait for ranks that have not called this; then an AutoshardError names them
    inputs         "global": every rank passes the same whole batch; "local": every rank passes its own piece of it, which is what a
                   DataLoader with DistributedSampler gives
    check_inputs   when ranks compare the numbers of their inputs: "first": at the calls 1, 2, 3, 5, 9, ... of every variant; "always";
                   "never"

    One rank searches, the others receive its plan. Raises MeshError, UsageError, PlanError; with example_inputs
    (else at the first call) also what `plan` raises."""
    check_arguments(model, example_inputs, example_kwargs=example_kwargs, loss_fn=loss_fn, training=training, precision=precision, seeds=seeds,
                    cluster=cluster, memory_budget=memory_budget, time_limit=time_limit, plan=plan, progress=progress)
    options = Options(optimizer_name(optimizer), precision, with_held(model, seeds), inputs, outputs,
                      parse_bytes(memory_budget), cluster or default_cluster(mesh), time_limit, search, fallback, offload)
    profile = load_cluster(options.cluster)
    profile.links_for(as_mesh(mesh))
    if example_inputs is not None:
        check_called(model, example_inputs, example_kwargs)
    options.check_offload(profile, True)  # variants for inference have no state, and need none

    def planner(traced: Traced, mesh: Mesh, *, stored: Mapping[str, Spec], inputs: Mapping[str, Spec]) -> Plan:
        return plan_traced(traced, mesh, options, clock=Clock(progress), has_loss=loss_fn is not None,
                           fixed={**stored, **inputs}, profile=profile, interruptible=False)  # who stops a training script wants it to end

    return compile_model(model, mesh, planner, example_inputs=example_inputs, example_kwargs=example_kwargs,
                         loss_fn=loss_fn, training=training, precision=precision, inputs=inputs, outputs=outputs,
                         batch_axes=batch_axes, plan=plan, backend=backend, cache=cache, key=planner_key(options, profile),
                         checkpoint=checkpoint, device=device, join_timeout=join_timeout, marks=options.marks, fallback=fallback,
                         check_inputs=check_inputs)


def plan_traced(traced: Traced, mesh: Mesh, options: Options, *, clock: "Clock | None" = None, has_loss: bool = False,
                model_info: Mapping[str, Any] | None = None, fixed: Mapping[str, Spec] | None = None,
                profile: Cluster | None = None, interruptible: bool = True) -> Plan:
    """The search half of the pipeline, for a graph that is traced already. `fixed` placements of parameters,
    buffers and inputs by name come before seeds: that is how they are held already. `profile`: what `options.cluster` held
    when it was read; without it, it is read now."""
    clock = clock or Clock(None)
    return decide(prices(traced, mesh, options, clock=clock, fixed=fixed, profile=profile), options, clock=clock, has_loss=has_loss,
                  model_info=model_info, interruptible=interruptible)


def prices(traced: Traced, mesh: Mesh, options: Options, *, clock: "Clock | None" = None,
           fixed: Mapping[str, Spec] | None = None, profile: Cluster | None = None) -> CostTable:
    """What every strategy and every change of layout costs; explaining and comparing plans start from here too."""
    clock = clock or Clock(None)
    with clock("simplify"):
        graph = factor_graph(simplify(traced.graph))
        seeds = _holding(resolve_seeds(graph, mesh, options.seeds), graph, fixed or {})
        profile = profile or load_cluster(options.cluster)
    with clock("strategies"):
        strategies = reachable(graph, enumerate_strategies(graph, mesh, seeds, outputs=options.outputs))
    with clock("costs"):
        step = Training(options.optimizer, graph.training, offload=options.offload == "optimizer")
        table = build_cost_table(graph, mesh, profile, strategies, step)
        return replace(table, seeds=seeds)


def decide(table: CostTable, options: Options, *, clock: "Clock | None" = None, has_loss: bool = False,
           model_info: Mapping[str, Any] | None = None, formulation: Formulation | None = None, interruptible: bool = True) -> Plan:
    """Formulate, search, and read the plan from the solution. In training, where the best plan with ample memory does not
    fit, the search also decides what backward recomputes instead of keeping it. `interruptible`: Ctrl-C ends the search with the
    best plan so far, whose status says so. Raises InfeasibleError, and Interrupted where there is no plan yet."""
    clock, limit = clock or Clock(None), options.memory_limit(table.cluster)
    settings = options.settings(table.graph.training, has_loss)
    with clock("formulate"):
        asked = asked_of(formulation or formulated(table, options), settings)
        spread = propagate(asked.formulation, table.seeds) if options.search == PROPAGATE or table.seeds else None
        asked.known.extend([spread.choice] if spread else [])
    programs = Programs(asked, options, settings, SearchClock(options.time_limit))
    with stopping(programs.clock, interruptible), clock("search"):
        if options.search == PROPAGATE:
            solution = taken(asked.formulation, spread)
        else:
            asked, solution = searched(programs, clock.search)
        if solution.choice is None and programs.clock.stopped:
            raise Interrupted("interrupted before a plan that fits was found; there is no plan yet")
        if solution.choice is None:
            raise programs.nothing_fits(solution, spread.choice if options.search == PROPAGATE else None)
    with clock("assemble"):
        found = make_plan(asked.formulation, solution, memory_limit=limit, model=model_info or {}, settings=settings,
                          seeds={k: seed_text(v) for k, v in options.seeds.items()}, notes=_seed_notes(table), played=asked.played)
        found = replace(found, notes=(*found.notes, *whole_notes(table.graph, found))).recomputing(table.graph.hash)
    if options.search == PROPAGATE:
        for warning in spread.warnings:
            logging.getLogger("autoshard.propagate").warning(warning)
        found = replace(found, status=spread.status, notes=(*found.notes, *spread.warnings))
    return replace(found, timings=dict(clock.seconds))


def _seed_notes(table: CostTable) -> tuple[str, ...]:
    """How much every seed matched, and what `annotate` marked."""
    lines = [f"seed {key} holds for {n} tensor{'s' if n > 1 else ''}" for key, n in table.seeds.matches.items()]
    forward = [op for op in marks(table.graph) if op.phase == "forward"]
    given = sum(was_given(op) for op in forward) // 2
    marked = sum(not was_given(op) for op in forward)
    lines += [f"autoshard.annotate holds {marked} activation{'s' if marked > 1 else ''}"] * (marked > 0)
    return (*lines, *[f"{given} collective{'s' if given > 1 else ''} of the model taken as given"] * (given > 0))


def _holding(seeds: Seeds, graph: Graph, fixed: Mapping[str, Spec]) -> Seeds:
    held = {op.name: frozenset({tuple(fixed[op.target])}) for op in graph.of_kind("param", "buffer", "input")
            if op.target in fixed}
    return replace(seeds, specs={**seeds.specs, **held})


def as_mesh(mesh: Any) -> Mesh:
    """A Mesh from text, a Mesh, or a torch DeviceMesh. Raises MeshError."""
    return mesh_of(mesh)


def default_cluster(mesh: Any) -> str:
    """The profile to assume when the user names none."""
    return "cpu-gloo" if getattr(mesh, "device_type", "") == "cpu" else "h100-dgx"


def optimizer_name(optimizer: Any) -> str:
    """"adamw" for torch.optim.AdamW and the like; SGD with momentum is "momentum"."""
    if isinstance(optimizer, str) or optimizer is None:
        return optimizer or "none"
    return getattr(optimizer, "__name__", type(optimizer).__name__).lower()


class Clock:
    """Times phases by wall clock and by CPU time of the process, and tells the user where the work is."""

    def __init__(self, progress: Progress | None) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}
        self._progress = progress or (lambda phase, detail: None)

    def say(self, phase: str) -> None:
        """Announce a phase that is not timed."""
        self._progress(phase, "")

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        log = logging.getLogger(f"autoshard.{phase}")
        log.debug("begins")
        start, cpu = time.perf_counter(), cpu_seconds()
        try:
            self._progress(phase, "")
            yield
        except Interrupted:
            raise
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted in the phase {phase!r}; there is no plan yet") from None
        self.seconds[phase] = time.perf_counter() - start
        self.cpu_seconds[phase] = cpu_seconds() - cpu
        log.info("took %.2f s (%.2f s of CPU time)", self.seconds[phase], self.cpu_seconds[phase])

    def search(self, cost: float, bound: float, gap: float, seconds: float, message: str = "") -> None:
        """Progress of the search: incumbent, bound, gap."""
        text = f"{cost:.6g} s, bound {bound:.6g} s, gap {gap:.2%} after {seconds:.1f} s {message}".strip()
        logging.getLogger("autoshard.search").debug(text)
        self._progress("search", text)
