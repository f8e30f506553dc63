"""`autoshard.Planner`: one model planned many times, where a second plan costs little."""
from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
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
from autoshard.study import what_if, worth

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
        key = f"{_shapes((inputs, kwargs))} {how} {_state(model)}"
        if key not in self._benches:
            self._benches[key] = Workbench(Batch(model, inputs, kwargs, how), given["loss_fn"] is not None, given["model_info"] or {},
                                             self._benches.values())
        self._benches[key] = self._benches.pop(key)  # the one used last comes last
        for oldest in list(self._benches)[:-MOST_BATCHES]:
            del self._benches[oldest]
        return self._benches[key]


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
