"""Plans stages of one pipeline: each by a search, or, where it is like one that was searched before, by the same decision under its own names.

What was decided about a stage is taken for another one that is alike if it fits there and no search there would know of a better one: its bound
is one whatever the memory is, or it is proven the best and as many micro-batches are in flight. So where memory binds, and stages have different
numbers in flight, each is searched. At a rate per byte all stages are searched as if they had as many in flight as the one with most, so that
there is one search for all that are alike.
"""
from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autoshard.base.graph import Graph
from autoshard.base.mesh import Mesh
from autoshard.base.plan import Plan
from autoshard.base.spec import Spec
from autoshard.base.worth import SAME
from autoshard.cost.cluster import AxisLink, Cluster
from autoshard.decide.backends import Found
from autoshard.decide.make_plan import Timelines
from autoshard.decide.memory.at_a_rate import searched_at_rate, within
from autoshard.decide.options import Options
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.decide.program import Program
from autoshard.formulate.alike import Like, likeness
from autoshard.formulate.problem_of import Formulation
from autoshard.pipeline.plan_stages import ALL, Room
from autoshard.planner.one_stage import prices, searched, seeds_of_stage
from autoshard.program.calling import Traced
from autoshard.search.problem import Solution, Status
from autoshard.seeds.seeds import Seeds
from autoshard.space.cost_table import CostTable, Training

MOST = 6
"""Decisions that are kept: with their prices each takes as much memory as a search."""


@dataclass(frozen=True, eq=False)
class Decided:
    """What was found for a stage with the prices `table`."""

    found: Found
    table: CostTable

    def on(self, like: Like) -> Decided:
        """The same under the names of another stage."""
        return self._with(like.problem(self.found.program.formulation), like.prices(self.table))

    @property
    def bare(self) -> Decided:
        """Without what its search has learned, and played."""
        return self._with(self.found.program.formulation, self.table)

    def _with(self, formulation: Formulation, table: CostTable) -> Decided:
        settings = self.found.program.settings
        return Decided(replace(self.found, program=Program(formulation, Timelines(formulation, settings), settings=settings)), table)

    def holds_after(self, before: Training) -> bool:
        """Whether the decision about a stage that does `before` in a step is the best one here too."""
        solution, own = self.found.solution, self.table.training
        if not self.found.program.fits(solution.choice):
            return False
        whatever = solution.bound <= self.found.ample * (1.0 + SAME)  # the memory is
        return whatever or solution.gap <= SAME and before.fullest == own.fullest


@dataclass(eq=False)
class StagePlanner:
    """A `PlanStage`. `traced`: the model, of which a stage has its own graph; `mesh`: of every stage; `wire`: between stages; the others as
    of `decide`."""

    traced: Traced
    mesh: Mesh
    options: Options
    profile: Cluster
    wire: AxisLink
    clock: PhaseTimer
    interruptible: bool = True
    model_info: Mapping[str, Any] | None = None
    has_loss: bool = False
    solutions: dict[str, Solution] = field(default_factory=dict)
    decided: dict[Hashable, Decided] = field(default_factory=dict)

    def __call__(self, graph: Graph, fixed: Mapping[str, Spec], in_flight: int, room: Room = ALL, asked: Options | None = None) -> Plan:
        """`asked`: other options than those of the pipeline."""
        options = asked or self.options
        step = Training(options.optimizer, graph.training, offload=options.offload == "optimizer", wire=self.wire, in_flight=in_flight,
                        duty=room.duty, most=room.most)
        options = options if room.share == 1.0 else replace(options, memory_budget=room.share * options.memory_limit(self.profile))
        with self.clock("strategies"):
            seeds = seeds_of_stage(graph, self.mesh, options, fixed)
            key = likeness(graph, seeds), options.memory_limit(self.profile), options.time_limit, room.rate, step.most
        made = self._alike(key, graph, seeds, step, room.rate) or self._searched(key, graph, fixed, step, options, room.rate)
        found = within(made.found, made.table, room.rate) if room.rate else made.found
        with self.clock("assemble"):
            plan = found.plan(made.table, self.model_info or {}, options.marks)
        return replace(plan, timings=dict(self.clock.seconds))

    def _alike(self, key: Hashable, graph: Graph, seeds: Seeds, step: Training, rate: float) -> Decided | None:
        """What was decided about a stage that is alike, where it holds for this one."""
        if (before := self.decided.get(key)) is None:
            return None
        with self.clock("formulate"):
            here = before.on(Like(graph, before.table.graph, seeds, step))
            return here if rate or here.holds_after(before.table.training) else None

    def _searched(self, key: Hashable, graph: Graph, fixed: Mapping[str, Spec], step: Training, options: Options, rate: float) -> Decided:
        how: dict[str, Any] = {"clock": self.clock, "known": self.solutions, "has_loss": self.has_loss}
        table = prices(replace(self.traced, graph=graph), self.mesh, options, clock=self.clock, fixed=fixed, profile=self.profile, step=step)
        found = searched_at_rate(table, options, rate, **how) if rate else searched(table, options, interruptible=self.interruptible, **how)
        made = Decided(found, table)
        if not (found.warnings or found.solution.status is Status.INTERRUPTED):
            self.decided.pop(key, None)
            self.decided[key] = made.bare
            for oldest in list(self.decided)[:-MOST]:
                del self.decided[oldest]
        return made
