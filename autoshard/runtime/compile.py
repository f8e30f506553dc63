"""The phases that make one variant of a model run: the leader's plan, schedule, lower, bind. `api.compile` puts them in a row."""
from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from autoshard import _torch
from autoshard.base.graph import Graph
from autoshard.base.mesh import Mesh
from autoshard.base.plan import Plan
from autoshard.base.roles import Role
from autoshard.base.spec import Spec
from autoshard.decide.kept import Known, carried
from autoshard.decide.options import Options
from autoshard.decide.pipeline_options import Pipeline
from autoshard.errors import PlanError, UsageError
from autoshard.lower.lower import Lowered, lower
from autoshard.lower.schedule import Schedule, schedule
from autoshard.program.calling import Traced
from autoshard.program.taken import check_taken
from autoshard.recompute.rewrite import with_recompute
from autoshard.runtime.cache import cached, key_of
from autoshard.runtime.check_plan import check_asked, check_fits
from autoshard.runtime.execute.backends import backend_of
from autoshard.runtime.microbatches import MicroStep
from autoshard.runtime.params.host_state import keep_on_host
from autoshard.runtime.params.overlaps import check_overlaps
from autoshard.runtime.params.stored import Stored
from autoshard.runtime.ranks.agree import alone, share
from autoshard.runtime.ranks.conditions import warn_of_other_conditions
from autoshard.runtime.ranks.place import Place
from autoshard.runtime.route import route_of
from autoshard.runtime.step import Step

log = logging.getLogger("autoshard")


class Planner(Protocol):
    """Searches a plan. `stored` and `inputs` fix placements by name ("wq.weight", "input:0"), `pipeline` where stages begin."""

    def __call__(self, traced: Traced, mesh: Mesh, *, stored: Mapping[str, Spec], inputs: Mapping[str, Spec],
                 pipeline: Pipeline | None = None) -> Plan: ...


Keep = Callable[[Sequence[Plan], Sequence[Known], Graph, Mesh], Plan | None]
"""Takes plans of other variants that can run a graph, all variants there are, the graph and the mesh; gives the plan to keep, at its new
prices, or None: search."""


@dataclass(frozen=True, eq=False)
class Settings:
    """What the variants of a compiled model share. `build`: from a variant to its running form, as `api.compile` has it; `plan`: given, and
    replayed for the variant it was made for; `key`: text of everything that decides a plan, for the cache; `keep`: None: every variant is
    searched."""

    build: Callable[[Variant], Step]
    options: Options = field(default_factory=Options)
    loss_fn: Callable[..., Any] | None = None
    plan: Plan | None = None
    key: str = ""
    keep: Keep | None = None

    @property
    def tracing(self) -> dict[str, Any]:
        """How the model is traced."""
        options = self.options
        return {"loss_fn": self.loss_fn, "precision": options.precision, "marks": options.marks, "fallback": options.fallback,
                "expert_capacity": options.expert_capacity, "pad": options.pad, "hooks_run": True}


@dataclass(frozen=True, eq=False)
class Variant:
    """One form of a model's call (training or not, shapes, dtypes), traced, and the phases that make it run. The first one settles the
    parameters' placements; later ones keep them, unless `replan`. `known`: variants that were searched. `inputs`: placements of those that
    come in split; `seed`: of parameters that have no numbers yet. Ranks run the phases together; each raises what planning and lowering raise."""

    traced: Traced
    place: Place
    stored: Stored
    settings: Settings
    inputs: Mapping[str, Spec]
    seed: int
    replan: bool = False
    known: Sequence[Known] = ()

    def agreed_plan(self, planner: Planner) -> Plan:
        """The plan given, one from the cache, or one by the planner, which runs on the leading rank; the same on every rank."""
        graph, mesh = self.traced.graph, self.place.mesh
        text = share(self.place, {"mesh": str(mesh), "graph of the model": graph.hash}, lambda: self._plan(planner).to_json(), self._timeout)

        def checked() -> Plan:
            plan = Plan.from_json(text)
            self.check(plan)
            if self.settled and not self.replan:
                self.stored.check(plan.placements)
            return plan

        return alone(self.place, checked)

    @property
    def settled(self) -> Mapping[str, Spec]:
        """Placements of parameters and buffers that an earlier variant settled."""
        return self.stored.specs

    @property
    def pipeline(self) -> Pipeline | None:
        """The stages that an earlier variant settled."""
        return None

    def check(self, plan: Plan) -> None:
        """Raises PlanError for a plan that is not for this program and mesh."""
        check_fits(plan, self.traced.graph, self.place.mesh)

    def schedule(self, plan: Plan) -> Schedule:
        """The order in which a rank works."""
        return alone(self.place, lambda: schedule(self._graph(plan), plan, plan.spec_mesh, route_of(plan)))

    def lower(self, plan: Plan, order: Schedule) -> Lowered:
        """The graphs of local ops that do it, the same on every rank."""
        return alone(self.place, lambda: lower(self._graph(plan), plan, plan.spec_mesh, order))

    def bind(self, plan: Plan, program: Lowered) -> Step:
        """The parameters where the plan wants them, and the local graphs with this rank's place and backend."""
        running = self.settings.options.running
        if not self.stored.specs:
            alone(self.place, lambda: self.stored.check_checkpoint(running.checkpoint))
        share(self.place, "lowered", lambda: "", running.timeout)  # from here on ranks may meet in collectives
        if not self.stored.specs:
            self.stored.settle(plan.placements, self.seed, running.checkpoint, graph=self.traced.graph)
            warn_of_other_conditions(plan.cluster, self.place)
        if self.traced.graph.training:
            keep_on_host(self.stored.params, plan.offload, afresh=self.replan)
        kind = MicroStep if self.traced.graph.microbatches > 1 else Step
        return kind(self._graph(plan), self.traced.calling, plan, program, self.place, self.stored, backend_of(running.backend),
                    self.settings.options.passing.outputs, self.inputs)

    @property
    def _timeout(self) -> float:
        return self.settings.options.running.timeout

    def _graph(self, plan: Plan) -> Graph:
        return with_recompute(self.traced.graph, plan.recompute)

    def _plan(self, planner: Planner) -> Plan:
        graph, mesh, given = self.traced.graph, self.place.mesh, self.settings.plan
        stored = {} if self.replan else dict(self.settled)
        if given is not None and not self.replan:
            if given.graph_hash == graph.hash or not stored and given.settings.get("training") == graph.training:
                self.check(given)
            if given.graph_hash == graph.hash:
                check_asked(given, graph, self.settings.options)
                return given
            stored = stored or given.placements
            log.info("the given plan is for another variant; planning this one with its placements")
        names = {op.target for op in graph.of_kind("param", "buffer")} | set(graph.outputs(Role.MUTATION))
        stored = {name: spec for name, spec in stored.items() if name in names}
        if not self.replan and (kept := self._kept()) is not None:
            return kept
        key = key_of(graph.hash, str(mesh), self.settings.key, sorted(stored.items()), sorted(self.inputs.items()), *filter(None, (self.pipeline,)))
        return cached(self.settings.options.running.cache, key,
                      lambda: planner(self.traced, mesh, stored=stored, inputs=self.inputs, pipeline=self.pipeline),
                      self.check)


    def _kept(self) -> Plan | None:
        """The plan of a variant with other shapes, where it can run this one and is good enough."""
        if self.settings.keep is None or not self.known:
            return None
        plans: dict[Any, Plan] = {}
        for known in reversed(self.known):
            plan = carried(known, self.traced.graph)
            if plan is not None and (key := (tuple(plan.ops.items()), plan.copies)) not in plans and self._runs(plan):
                plans[key] = plan
        return self.settings.keep(tuple(plans.values()), self.known, self.traced.graph, self.place.mesh)

    def _runs(self, plan: Plan) -> bool:
        try:
            self.check(plan)
        except PlanError:  # a dim of this size does not divide
            return False
        return True


def check_compilable(model: nn.Module, mesh: Mesh, options: Options) -> None:
    """Before ranks meet. Raises UsageError for a backend there is not, for gradient hooks, and for modules and tensors that cannot be copied
    as they are, MeshError for batch axes that the mesh lacks.

    Compiling copies the model, and a copy of a parameter has no hooks: they would be lost without a word."""
    backend_of(options.running.backend)
    check_taken(model)
    if model.training:
        check_overlaps(model)
    for name, p in model.named_parameters():
        if p.requires_grad and _torch.has_gradient_hook(p):
            raise UsageError(f"parameter {name!r} has a gradient hook (register_hook or register_post_accumulate_grad_hook), and the compiled model "
                             "has parameters of its own; register it on those, after compile()")
    for axis in options.passing.batch_axes:
        mesh.index(axis)
