"""What another machine would be worth: the model planned anew under changed numbers, beside its plan of today."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard.base import quantities
from autoshard.base.mesh import Mesh
from autoshard.base.notebook import grid
from autoshard.base.plan import Plan
from autoshard.cost.cluster import load_cluster
from autoshard.decide.kept import repriced
from autoshard.decide.options import Options
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.errors import InfeasibleError, Interrupted, UsageError
from autoshard.planner.open_mesh import is_open
from autoshard.planner.workbench import Workbench
from autoshard.study.scenario import Scenario, scenarios

HEADINGS = ("what if", "step", "gain", "today's plan", "memory", "gap", "what changes")


@dataclass(frozen=True)
class WhatIf:
    """One scenario. Seconds of a step, bytes of a rank.

    plan     the best plan found then; None: `why` says why there is none
    kept_s   what a step of today's plan would take then; None where that is not priced: on another mesh, or where it would not fit
    changes  what is different in the plan, in words"""

    asked: str
    plan: Plan | None
    gain_s: float | None = None
    kept_s: float | None = None
    changes: tuple[str, ...] = ()
    why: str = ""

    def least_gain_s(self, today: Plan) -> float | None:
        """What is gained at least: today's step might be as short as its bound."""
        return None if self.plan is None else today.bound_s - self.plan.objective_s

    def most_gain_s(self, today: Plan) -> float | None:
        """What is gained at most: no plan then is faster than the bound."""
        return None if self.plan is None else today.objective_s - self.plan.bound_s

    def to_dict(self, today: Plan) -> dict[str, Any]:
        plan = self.plan
        return {"what_if": self.asked, "step_s": plan and plan.objective_s, "bound_s": plan and plan.bound_s, "gap": plan and plan.gap,
                "status": plan and plan.status, "gain_s": self.gain_s, "gain_least_s": self.least_gain_s(today),
                "gain_most_s": self.most_gain_s(today), "todays_plan_s": self.kept_s, "mesh": plan and str(plan.mesh),
                "memory_bytes": plan and plan.memory["total"], "changes": list(self.changes), "why": self.why}


@dataclass(frozen=True)
class WhatIfs:
    """Today's plan, and a row per scenario. `interrupted`: Ctrl-C ended it before all of them."""

    today: Plan
    rows: tuple[WhatIf, ...]
    interrupted: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {"today": {"step_s": self.today.objective_s, "bound_s": self.today.bound_s, "gap": self.today.gap, "status": self.today.status,
                          "mesh": str(self.today.mesh), "memory_bytes": self.today.memory["total"]},
                "what_if": [row.to_dict(self.today) for row in self.rows]}

    def cells(self) -> list[tuple[str, ...]]:
        """What tables show, under `HEADINGS`: today first."""
        return [_cells(self.today, WhatIf("today", self.today)), *(_cells(self.today, row) for row in self.rows)]

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return grid(f"What if, for {self.today.mesh} on {self.today.cluster.get('name')}", HEADINGS, self.cells(), ())


def what_if(bench: Workbench, mesh: Mesh, options: Options, asked: Sequence[str], *, clock: PhaseTimer | None = None,
            today: Plan | None = None) -> WhatIfs:
    """Plan, and plan anew under each scenario (scenario.py) with all that holds there kept. Ctrl-C ends it with the rows so far. `today`: the plan
    without a change, where it is known. Raises UsageError, ClusterError and MeshError before anything is planned; what `autoshard.plan` raises
    for today's plan. A scenario in which nothing fits is a row."""
    if is_open(mesh, options) or options.pipeline.stages(mesh) > 1:
        raise UsageError("what-if needs a mesh that is given, without pipeline stages, and a number of micro-batches")
    profile, clock = load_cluster(options.cluster), clock or PhaseTimer()
    found = scenarios(asked, mesh, options, profile)
    today = today or bench.plan(mesh, options, profile=profile, clock=clock)
    rows: list[WhatIf] = []
    for each in found:
        if today.interrupted or clock.ended.is_set():
            return WhatIfs(today, tuple(rows), interrupted=True)
        clock.say("what if", each.text)
        try:
            rows.append(_row(bench, mesh, options, each, today, clock))
        except Interrupted:
            return WhatIfs(today, tuple(rows), interrupted=True)
    return WhatIfs(today, tuple(rows))


def _row(bench: Workbench, mesh: Mesh, options: Options, asked: Scenario, today: Plan, clock: PhaseTimer) -> WhatIf:
    there, then, profile = asked.applied(mesh, options, load_cluster(options.cluster))
    try:
        plan = bench.plan(there, then, profile=profile, clock=clock.quiet())
    except InfeasibleError as e:
        return WhatIf(asked.text, None, why=str(e))
    kept = None
    if there == mesh and (today.memory["total"] or 0.0) <= then.memory_limit(profile):
        graph = bench.traced(there, then, clock).graph
        kept = repriced(today, graph, there, profile, then).objective_s
    plan = replace(plan, timings={})
    return WhatIf(asked.text, plan, today.objective_s - plan.objective_s, kept, tuple(what_changed(today, plan)))


def what_changed(before: Plan, after: Plan) -> list[str]:
    """How a plan differs from another one of the same model, in words: nothing where both run the same."""
    stored = sum(spec != after.placements.get(name) for name, spec in before.placements.items())
    ops = sum(op != after.ops.get(name) for name, op in before.ops.items() if name in after.ops)
    recomputed = len(before.recompute), len(after.recompute)
    away = len(before.offload), len(after.offload)
    calls = len(before.collectives), len(after.collectives)
    out = [f"{stored} weight{'s' * (stored > 1)} stored otherwise"] * bool(stored)
    out += [f"{ops} ops split otherwise"] * bool(ops)
    out += [_from_to(pair, what) for pair, what in ((recomputed, "ops recomputed"), (away, "optimizer states on the host"), (calls, "collectives"))
            if pair[0] != pair[1]]
    if not out and set(before.copies) != set(after.copies):
        out.append("copies kept or gathered otherwise")
    return out + [f"now: {after.kind}"] * (after.kind != before.kind)


def _from_to(pair: tuple[int, int], what: str) -> str:
    return f"{pair[1]} {what} instead of {pair[0]}"


def _cells(today: Plan, row: WhatIf) -> tuple[str, ...]:
    plan = row.plan
    if plan is None:
        return row.asked, "-", "", "", "", "", "does not fit"
    gain = "" if row.gain_s is None else f"{_signed(row.gain_s, quantities.seconds)} ({100 * row.gain_s / today.objective_s:+.1f} %)"
    gap = "0 %" if plan.gap < 1e-9 else f"{100 * plan.gap:.2g} %"
    changes = "" if row.gain_s is None else "; ".join(row.changes) or "nothing: the same plan"
    return (row.asked, quantities.seconds(plan.objective_s), gain, "" if row.gain_s is None else quantities.seconds(row.kept_s),
            quantities.size(plan.memory["total"]), gap, changes)


def _signed(value: float, written: Callable[[float], str]) -> str:
    return f"{'-' if value < 0 else '+' if value > 0 else ''}{written(abs(value))}"
