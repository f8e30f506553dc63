"""`autoshard.Planner`: one model planned many times, where a second plan costs little."""
from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoshard import api
from autoshard._torch import pytree
from autoshard.base.plan import Plan
from autoshard.decide.arguments import check_arguments, check_called
from autoshard.decide.options import Options, parse_bytes
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.errors import UsageError
from autoshard.pipeline.microbatches.batch import Batch
from autoshard.planner.open_mesh import asked_for
from autoshard.planner.workbench import Workbench
from autoshard.study import sizing, what_if, worth

MOST_BATCHES = 4
"""Batches of other shapes whose traces are kept."""
OWN = ("model", "mesh", "example_inputs", "example_kwargs")


class Planner:
    """Plans of one model, one after the other: other budgets, meshes, clusters, seeds, batches. What one plan found out and the next one needs
    is kept: the trace, prices, the problem, what was proven with ample memory.

        planner = autoshard.Planner(model, (x, y), loss_fn=loss)      # options: those of autoshard.plan
        plan = planner.plan("dp=8,tp=8")
        less = planner.plan("dp=8,tp=8", memory_budget="40GiB")       # llama 8B: below a CPU second
        table = planner.what_if("dp=8,tp=8", ["links.infiniband.bandwidth=2x", "memory=+16GiB"])

    Options given here hold for all plans, those of a call come before them. A model whose parameters are frozen or put into another mode is
    traced anew; otherwise it must not change. Plans may differ from those of `autoshard.plan` where these are not proven optimal: a search starts
    from what earlier ones found."""

    def __init__(self, model: nn.Module, example_inputs: Sequence[Any] = (), example_kwargs: Mapping[str, Any] | None = None, **options: Any) -> None:
        self._given = {**_defaults(), **_checked(options), "model": model, "example_inputs": example_inputs, "example_kwargs": example_kwargs}
        check_arguments(self._given)
        self._benches: dict[str, Workbench] = {}
        self._batches: dict[str, list[Batch]] = {}  # traced alike: those of `_benches`

    def plan(self, mesh: Any, example_inputs: Sequence[Any] | None = None, example_kwargs: Mapping[str, Any] | None = None, **options: Any) -> Plan:
        """As `autoshard.plan`, which says what the options are and what is raised. `example_inputs`: another batch."""
        return self._asked(_plan, mesh, options, example_inputs, example_kwargs)

    def what_if(self, mesh: Any, changes: Sequence[str], **options: Any) -> what_if.WhatIfs:
        """The plan of today and those under changes of the machine: "links.infiniband.bandwidth=2x", "device.peak=+50%", "memory=96GiB",
        "mesh.dp=2x", several that hold together with commas between (see docs/what-if.md). Raises UsageError for a path that is not there, and what
        `autoshard.plan` raises."""
        def run(bench: Workbench, mesh: Any, asked: Options, clock: PhaseTimer) -> what_if.WhatIfs:
            return what_if.what_if(bench, mesh, asked, changes, clock=clock)

        return self._asked(run, mesh, options)

    def worth(self, mesh: Any, step: str | float | None = None, **options: Any) -> Plan:
        """The plan, whose `worth` says what `step` of memory more or less per rank would change; default: a GiB, or a sixteenth of a small budget."""
        def run(bench: Workbench, mesh: Any, asked: Options, clock: PhaseTimer) -> Plan:
            return worth.with_worth(bench, mesh, asked, clock=clock, step=parse_bytes(step))

        return self._asked(run, mesh, options)

    def sweep(self, meshes: Sequence[Any], batches: Sequence[Any] = (), *, clusters: Sequence[str] = (), memory_budgets: Sequence[str | float] = (),
              **options: Any) -> sizing.Sizing:
        """A plan for every batch on every mesh, cluster and budget, with samples and tokens a second: see `autoshard.sweep`."""
        given = {**self._given, **_checked(options)}
        calls = [_call(batch) for batch in batches] or [(given["example_inputs"], given["example_kwargs"])]
        budgets = [parse_bytes(text) for text in memory_budgets] or [parse_bytes(given["memory_budget"])]
        asked = []
        for mesh in _several("meshes", meshes):
            wanted, read, _ = asked_for(given, mesh)
            for budget in budgets:
                replace(read, memory_budget=budget)  # checks it
            asked.append((wanted, read))
        jobs = []
        for inputs, kwargs in calls:
            check_arguments(given | {"example_inputs": inputs, "example_kwargs": kwargs})
            bench = self._bench({**given, "example_inputs": inputs, "example_kwargs": kwargs}, asked[0][1])
            jobs.append(sizing.Job(bench.batch, bench.has_loss, bench.model_info))
        cases = sizing.Cases(asked, _several("clusters", clusters or (asked[0][1].cluster,)), budgets)
        return sizing.sweep(jobs, cases, PhaseTimer(given["progress"]))

    def _asked(self, run: Callable[[Workbench, Any, Options, PhaseTimer], Any], mesh: Any, options: Mapping[str, Any],
               inputs: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None) -> Any:
        given = {**self._given, **_checked(options)}
        if inputs is not None or kwargs is not None:
            given |= {"example_inputs": () if inputs is None else inputs, "example_kwargs": kwargs}
        check_arguments(given)
        wanted, asked, _ = asked_for(given, mesh)
        return run(self._bench(given, asked), wanted, asked, PhaseTimer(given["progress"]))

    def _bench(self, given: Mapping[str, Any], options: Options) -> Workbench:
        model, inputs, kwargs = given["model"], tuple(given["example_inputs"]), dict(given["example_kwargs"] or {})
        check_called(model, inputs, kwargs)
        how = options.tracing(given["loss_fn"], given["training"])
        alike = f"{how} {_state(model)}"
        key = f"{_shapes((inputs, kwargs))} {alike}"
        if key not in self._benches:
            others = self._batches.setdefault(alike, [])
            others.append(Batch(model, inputs, kwargs, how, others))
            self._benches[key] = Workbench(others[-1], given["loss_fn"] is not None, given["model_info"] or {}, self._benches.values())
        self._benches[key] = self._benches.pop(key)  # the one used last comes last
        for oldest in list(self._benches)[:-MOST_BATCHES]:
            gone = self._benches.pop(oldest).batch
            for others in self._batches.values():
                others[:] = [batch for batch in others if batch is not gone]
        return self._benches[key]


def sweep(model: nn.Module, meshes: Sequence[Any], batches: Sequence[Any], *, clusters: Sequence[str] = (),
          memory_budgets: Sequence[str | float] = (), **options: Any) -> sizing.Sizing:
    """What a model would train in a second: the cheapest plan for every batch on every mesh, cluster and memory budget.

        found = autoshard.sweep(model, [8, 64, "dp=8,tp=8"], [(x16, y16), (x32, y32)], clusters=["h100-dgx", "a100-dgx"], loss_fn=loss)
        [(p.case, p.samples_s, p.tokens_s, p.plan.mesh) for p in found.planned]     # in a notebook, `found` is a table

    meshes          each as `autoshard.plan` takes it; a number of devices: any mesh of them
    batches         example inputs: a tuple of positional ones, or a dict of those by name. Samples are the rows of the first tensor
    clusters        names or files of profiles; default: that of `autoshard.plan`
    memory_budgets  bytes a rank may use, or text such as "40GiB"; default: what devices have
    options         those of `autoshard.plan`

    A batch is traced once. A case that cannot be (nothing fits, more devices than the cluster has) is a point with the reason in `why`. Ctrl-C ends
    it with the points so far. Raises what `autoshard.plan` raises for bad arguments and models that cannot be traced."""
    first = _call(_several("batches", batches)[0])
    return Planner(model, *first, **options).sweep(meshes, batches, clusters=clusters, memory_budgets=memory_budgets)


def _several(name: str, values: Any) -> Sequence[Any]:
    """Raises UsageError."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or not values:
        raise UsageError(f"{name}={values!r:.60}: give a list, with one or more")
    return values


def _call(batch: Any) -> tuple[Sequence[Any], Mapping[str, Any] | None]:
    """Raises UsageError."""
    if isinstance(batch, Mapping):
        return (), batch
    if not isinstance(batch, (tuple, list)):
        raise UsageError(f"a batch is {type(batch).__name__}; give a tuple of example inputs, (x, target), or a dict of them by name")
    return batch, None


def _plan(bench: Workbench, mesh: Any, options: Options, clock: PhaseTimer) -> Plan:
    return bench.plan(mesh, options, clock=clock)


def _defaults() -> dict[str, Any]:
    return {name: p.default for name, p in inspect.signature(api.plan).parameters.items() if name not in OWN}


def _checked(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raises UsageError for what `autoshard.plan` does not take."""
    for name in options.keys() - _defaults().keys():
        raise UsageError(f"{name}= is no option of a plan; there are {', '.join(_defaults())}")
    return options


def _shapes(call: Any) -> str:
    """What a trace sees of a call."""
    leaves, tree = pytree.tree_flatten(call)
    return f"{tree} {[(tuple(x.shape), x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else x for x in leaves]}"


def _state(model: nn.Module) -> str:
    """What a trace sees of a model besides its code."""
    return f"{torch.is_grad_enabled()} {[m.training for m in model.modules()]} {[(p.dtype, p.requires_grad) for p in model.parameters()]}"
