"""The chosen plan beside the plans experts write by hand, all priced by the same tables."""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from autoshard.base import quantities
from autoshard.base.fine_mesh import NEVER
from autoshard.base.mesh import Mesh
from autoshard.base.notebook import grid
from autoshard.base.plan import LATE_REDUCTION, Plan
from autoshard.decide.make_plan import Timelines, make_plan
from autoshard.decide.memory.memory_problems import possible
from autoshard.decide.options import Options
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.decide.program import formulate_within, with_starts
from autoshard.decide.walks.baselines import baseline
from autoshard.decide.walks.propagate import propagate
from autoshard.decide.walks.reads import Wiring
from autoshard.decide.walks.schemes import Scheme, batch_size, schemes
from autoshard.errors import InfeasibleError, SeedError
from autoshard.formulate.problem_of import Formulation
from autoshard.planner.one_stage import decide, prices
from autoshard.planner.stages import plan_traced
from autoshard.program.calling import Traced
from autoshard.search.problem import Solution, Status, evaluate
from autoshard.seeds.from_transformers import HandPlan
from autoshard.space.cost_table import CostTable

CHOSEN = "chosen by the search"
PROPAGATED = "propagated from seeds"


@dataclass(frozen=True)
class Contender:
    """One row: a plan with its name, the mesh axes it uses for what, and whether it fits; or why there is none.

    Times in seconds per step, bytes per rank and step; `exposed_s` is communication that compute does not hide,
    `moved_bytes` the sum over collectives of what docs/costs.md calls their bytes."""

    name: str
    axes: str
    plan: Plan | None
    fits: bool = False
    note: str = ""

    @property
    def exposed_s(self) -> float | None:
        return None if self.plan is None else self.plan.predicted["blocking_s"] + self.plan.predicted["exposed_s"]

    @property
    def moved_bytes(self) -> int | None:
        return None if self.plan is None else sum(c.nbytes for c in self.plan.collectives)

    @property
    def memory_bytes(self) -> float | None:
        return None if self.plan is None else self.plan.memory["total"]

    def to_dict(self) -> dict[str, Any]:
        """Plain data; numbers are null where there is no plan."""
        predicted = {} if self.plan is None else self.plan.predicted
        times = {k: predicted.get(k) for k in ("step_s", "compute_s", "hidden_s", "optimizer_s")}
        return {"name": self.name, "axes": self.axes, **times, "exposed_s": self.exposed_s, "moved_bytes": self.moved_bytes,
                "collectives": None if self.plan is None else len(self.plan.collectives),
                "memory_bytes": self.memory_bytes, "fits": self.fits, "note": self.note}


@dataclass(frozen=True)
class Comparison:
    """`contenders`: the chosen plan first, then the baselines. `limit_bytes`: memory a rank may use."""

    model: Mapping[str, Any]
    mesh: Mesh
    cluster: str
    limit_bytes: float
    contenders: tuple[Contender, ...]
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> Contender:
        return self.contenders[0]

    @property
    def best_baseline(self) -> Contender | None:
        """The fastest baseline that fits."""
        fitting = [c for c in self.contenders[1:] if c.fits and c.plan is not None]
        return min(fitting, key=lambda c: c.plan.objective_s, default=None)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        rows = [(c.name, c.axes, *(("-",) * 4 if c.plan is None else (
            quantities.seconds(c.plan.objective_s), quantities.seconds(c.exposed_s), quantities.size(c.moved_bytes),
            quantities.size(c.memory_bytes))), "yes" if c.fits else "no") for c in self.contenders]
        return grid(f"Plans for {self.mesh} on {self.cluster}", ("plan", "axes", "step", "exposed", "moved", "memory", "fits"), rows, self.notes)

    def to_dict(self) -> dict[str, Any]:
        return {"model": dict(self.model), "mesh": str(self.mesh), "cluster": self.cluster, "limit_bytes": self.limit_bytes,
                "rows": [c.to_dict() for c in self.contenders], "notes": list(self.notes)}


def comparison(traced: Traced, mesh: Mesh, options: Options, *, model: Mapping[str, Any] | None = None,
               has_loss: bool = False, clock: PhaseTimer | None = None, own: Mapping[str, HandPlan] | None = None) -> Comparison:
    """Search a plan, make every baseline, and price them alike. Seeds hold for the chosen plan and for propagation
    only: a baseline is what it is. `own`: plans that the model brings along, by name; the last mesh axis is theirs, the others split the
    batch. Raises what `api.prices` raises; a model that fits nowhere is a row, not an error."""
    clock = clock or PhaseTimer(None)
    table = prices(traced, mesh, options, clock=clock)
    free = table if not options.seeds else prices(traced, mesh, replace(options, seeds={}))
    formulation = formulate_within(table, options.memory_limit(table.cluster))
    theirs = formulation if free is table else formulate_within(free, formulation.budget.limit)
    write = _Writer(options, has_loss, model or {})
    chosen = _chosen(table, formulation, write, clock) if options.refine_axes == NEVER else _chosen_of(
        lambda: plan_traced(traced, mesh, options, clock=clock, has_loss=has_loss, model_info=model))
    clock.say("baselines")
    rows = (chosen, write.propagated(formulation), *write.baselines(theirs),
            *(write.own_plan(name, plan, traced, mesh, formulation.budget.limit) for name, plan in (own or {}).items()))
    notes = ("the seeds hold for the chosen plan and for propagation, not for the baselines",) if options.seeds else ()
    return Comparison(model or {}, mesh, table.cluster.name, formulation.budget.limit, rows, notes)


def save(found: Comparison, folder: Path) -> None:
    """One plan file per contender that has a plan: chosen.json, ddp.json, ... Raises UsageError."""
    for i, row in enumerate(found.contenders):
        if row.plan is not None:
            row.plan.save(folder / f"{file_name(row.name) if i else 'chosen'}.json")


def file_name(name: str) -> str:
    """`"FSDP (ZeRO-3)"` -> `"fsdp"`, `"TP + sequence parallel"` -> `"tp-sequence-parallel"`."""
    return "-".join(re.findall(r"[a-z0-9]+", re.sub(r"[(][^)]*[)]$", "", name.lower()))) or "plan"


def _chosen(table: CostTable, formulation: Formulation, write: "_Writer", clock: PhaseTimer) -> Contender:
    program = with_starts(formulation, write.options.settings(table.graph.training, write.has_loss))
    return _chosen_of(lambda: decide(table, write.options, clock=clock, has_loss=write.has_loss, model_info=write.model, program=program))


def _chosen_of(search: Callable[[], Plan]) -> Contender:
    try:
        plan = search()
    except InfeasibleError as e:
        return Contender(CHOSEN, "", None, False, str(e))
    return Contender(CHOSEN, "", plan, True, plan.status)


@dataclass(frozen=True)
class _Writer:
    """Makes plans out of choices. `timelines`: the memory of plans per formulation, which share what they learn about ops."""

    options: Options
    has_loss: bool
    model: Mapping[str, Any]
    timelines: dict[tuple[int, bool], Timelines] = field(default_factory=dict)

    def baselines(self, formulation: Formulation) -> Iterator[Contender]:
        wiring, mesh = Wiring(formulation), formulation.table.mesh
        for scheme in schemes(mesh, formulation.table.graph):
            obstacle = scheme.obstacle(formulation.table.graph, mesh)
            choice = None if obstacle else baseline(wiring, scheme)
            if choice is not None and not possible(formulation.problem, [choice]):
                obstacle = "the collectives that the model calls itself rule it out"
            yield Contender(scheme.name, scheme.describe(mesh), None, False, obstacle) if obstacle else (
                self.contender(formulation, choice, scheme))

    def propagated(self, formulation: Formulation) -> Contender:
        seeds = formulation.table.seeds
        if not seeds:
            return Contender(PROPAGATED, "", None, False, "there are no seeds")
        spread = propagate(formulation, seeds)
        plan = replace(self.plan(formulation, spread.choice, ""), status=spread.status)
        return Contender(PROPAGATED, "", plan, _fits(plan), f"{len(spread.warnings)} edges communicate")

    def own_plan(self, name: str, plan: HandPlan, traced: Traced, mesh: Mesh, limit: float) -> Contender:
        """The plan that the model brings along: its placements of parameters, and the cheapest way to compute with them."""
        data, inputs = mesh.names[:-1], traced.graph.of_kind("input")
        ranks, rows = mesh.ranks(range(mesh.ndim - 1)), batch_size(inputs)
        axes = f"data {'*'.join(data)}, tensor {mesh.names[-1]}" if data else f"tensor {mesh.names[-1]}"
        if rows % ranks:
            return Contender(name, axes, None, False, f"a batch of {rows} does not split over {ranks} ranks")
        split = {f"input:{i}": (data, ...) for i, op in enumerate(inputs) if data and op.outputs[0].shape[:1] == (rows,)}
        try:
            table = prices(traced, mesh, replace(self.options, seeds={**plan.seeds, **split}))
        except SeedError as e:
            return Contender(name, axes, None, False, str(e))
        formulation = formulate_within(table, limit)
        made = self.plan(formulation, propagate(formulation, table.seeds).choice, f"{name} ({axes})")
        return Contender(name, axes, made, _fits(made), "; ".join(plan.unsaid))

    def contender(self, formulation: Formulation, choice: np.ndarray, scheme: Scheme) -> Contender:
        axes = scheme.describe(formulation.table.mesh)
        plan = self.plan(formulation, choice, f"{scheme.name} ({axes})", scheme.late)
        return Contender(scheme.name, axes, plan, _fits(plan))

    def plan(self, formulation: Formulation, choice: np.ndarray, status: str, late: bool = False) -> Plan:
        """A plan that was not searched: nothing is proven about it, so its bound is 0. `late`: see `Scheme`."""
        solution = Solution(choice, evaluate(formulation.problem, choice), 0.0, Status.GAP, 0.0)
        table, timelines = formulation.table, self._timelines(formulation, late)
        if late:
            training = replace(table.training, reduces_late=True)
            formulation = replace(formulation, table=replace(table, training=training))
        plan = make_plan(formulation, solution, model=self.model, settings=timelines.settings, seeds={}, timelines=timelines)
        return replace(plan, status=f"by hand: {status}")

    def _timelines(self, formulation: Formulation, late: bool) -> Timelines:
        settings = self.options.settings(formulation.table.graph.training, self.has_loss)
        return self.timelines.setdefault((id(formulation), late), Timelines(formulation, {**settings, **(LATE_REDUCTION if late else {})}))


def _fits(plan: Plan) -> bool:
    return plan.memory["total"] <= plan.memory["limit"]
