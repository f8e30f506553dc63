"""trace -> the leader's plan -> lower -> bind, for one variant of a model."""
from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from autoshard.base.graph import Graph
from autoshard.base.mesh import Mesh
from autoshard.base.plan import Plan
from autoshard.base.precision import Precision
from autoshard.base.spec import Spec
from autoshard.decide.options import CHECKS
from autoshard.errors import UsageError
from autoshard.lower.lower import Lowered, lower
from autoshard.program.calling import Traced
from autoshard.program.simplify import simplify
from autoshard.recompute.rewrite import with_recompute
from autoshard.rules.factors import factor_graph
from autoshard.runtime.cache import cached, key_of
from autoshard.runtime.check_plan import check_fits
from autoshard.runtime.execute.backends import backend_of
from autoshard.runtime.inputs import Passing
from autoshard.runtime.params.host_state import keep_on_host
from autoshard.runtime.params.stored import Stored
from autoshard.runtime.ranks.agree import alone, share
from autoshard.runtime.ranks.place import Place
from autoshard.runtime.route import route_of
from autoshard.runtime.step import Step

log = logging.getLogger("autoshard")


class Planner(Protocol):
    """Searches a plan. `stored` and `inputs` fix placements by name ("wq.weight", "input:0")."""

    def __call__(self, traced: Traced, mesh: Mesh, *, stored: Mapping[str, Spec], inputs: Mapping[str, Spec]) -> Plan: ...


@dataclass(frozen=True, eq=False)
class Settings:
    """How to compile. `key`: text of everything the planner was set to, for the cache. `timeout`: seconds that ranks
    wait for the leader. `marks`: seeds on what leaves modules, as `trace` wants them; `fallback` too. `check_inputs`: when ranks
    compare the numbers of their inputs, see same_inputs.py."""

    planner: Planner
    loss_fn: Callable[..., Any] | None = None
    precision: Precision | None = None
    passing: Passing = field(default_factory=Passing)
    backend: str = "eager"
    plan: Plan | None = None
    cache: Path | None = None
    key: str = ""
    timeout: float = 3600.0
    checkpoint: str | None = None
    marks: Mapping[str, str] = field(default_factory=dict)
    fallback: str = "error"
    check_inputs: str = CHECKS[0]

    def __post_init__(self) -> None:
        if self.check_inputs not in CHECKS:
            raise UsageError(f"check_inputs={self.check_inputs!r} is not one of {', '.join(CHECKS)}")


def build(traced: Traced, place: Place, stored: Stored, settings: Settings, fixed_inputs: Mapping[str, Spec],
          seed: int, replan: bool = False) -> Step:
    """The running form of one variant. The first one settles the parameters' placements; later ones keep them,
    unless `replan`. Raises what tracing, planning and lowering raise."""
    graph = alone(place, lambda: factor_graph(simplify(traced.graph)))
    fixed = {} if replan else dict(stored.specs)
    text = share(place, {"mesh": str(place.mesh), "graph of the model": graph.hash}, lambda: _plan(
        traced, graph, place.mesh, settings, fixed, fixed_inputs, replan).to_json(), settings.timeout)

    def lowered() -> tuple[Plan, Lowered]:
        plan = Plan.from_json(text)
        check_fits(plan, graph, place.mesh)
        if stored.specs and not replan:
            stored.check(plan.placements)
        return plan, lower(with_recompute(graph, plan.recompute), plan, place.mesh, route_of(plan))

    plan, program = alone(place, lowered)
    if not stored.specs:
        alone(place, lambda: stored.check_checkpoint(settings.checkpoint))
    share(place, "lowered", lambda: "", settings.timeout)  # from here on ranks may meet in collectives
    if not stored.specs:
        stored.settle(plan.placements, seed, settings.checkpoint)
    if graph.training:
        keep_on_host(stored.params, plan.offload, afresh=replan)
    return Step(with_recompute(graph, plan.recompute), traced.calling, plan, program, place, stored, backend_of(settings.backend),
                settings.passing.outputs, fixed_inputs)


def _plan(traced: Traced, graph: Graph, mesh: Mesh, settings: Settings, stored: Mapping[str, Spec],
          inputs: Mapping[str, Spec], replan: bool) -> Plan:
    """The plan the user gave where it is for this variant, else one from the cache or the planner."""
    given = settings.plan
    if given is not None and not replan:
        if given.graph_hash == graph.hash:
            check_fits(given, graph, mesh)
            return given
        if not stored and given.settings.get("training") == graph.training:
            check_fits(given, graph, mesh)
        stored = stored or given.placements
        log.info("the given plan is for another variant; planning this one with its placements")
    names = {op.target for op in graph.of_kind("param", "buffer")}
    stored = {name: spec for name, spec in stored.items() if name in names}
    key = key_of(graph.hash, str(mesh), settings.key, sorted(stored.items()), sorted(inputs.items()))
    return cached(settings.cache, key, lambda: settings.planner(traced, mesh, stored=stored, inputs=inputs),
                  lambda found: check_fits(found, graph, mesh))
