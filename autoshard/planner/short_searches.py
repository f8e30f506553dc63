"""Short searches of blocks, of which prices and bounds of shapes are made (pipeline/shapes/mesh_prices.py)."""
from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from autoshard.base.graph import Graph, Op
from autoshard.base.mesh import Mesh
from autoshard.base.plan import Plan
from autoshard.base.spec import replicated
from autoshard.cost.cluster import AxisLink, Cluster
from autoshard.cost.memory import stored_parts
from autoshard.decide.how import How
from autoshard.decide.least_seconds import Prices, least_run, least_step
from autoshard.decide.memory.at_a_rate import Undecided, plan_at_rate
from autoshard.decide.options import Options
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.decide.program import formulate_within, with_starts
from autoshard.decide.walks.greedy import greedy_plans
from autoshard.pipeline.shapes.choose import AMPLE
from autoshard.pipeline.shapes.cut_search import SHORT_STAGES
from autoshard.pipeline.shapes.mesh_prices import Searches
from autoshard.planner.one_stage import decide, prices
from autoshard.program.calling import Traced
from autoshard.search import Clock
from autoshard.search.heap import settled_heap
from autoshard.space.cost_table import CostTable, Training, trained_params

ENOUGH = 0.01
"""The relative gap at which short searches end: prices of blocks leave out that neighbours agree on layouts, which is about as much."""
TABLES = 24
"""Cost tables that are kept: a block is bounded twice, and searched in ample memory and at several rates."""

OPEN = 4
"""Programs with recomputation open that are kept: the kinds of blocks of one submesh."""


def searches(whole: Traced, options: Options, clock: PhaseTimer, profile: Cluster) -> Searches:
    """Those of a model: `whole` is the program of all of its batch."""
    made = ShortSearches(whole, replace(options, time_limit=options.time_limit / SHORT_STAGES), clock.quiet(), profile)
    return Searches(made.plan, made.run, made.step, made.stored)


@dataclass(eq=False)
class ShortSearches:
    """What `Searches` says. `options`: with the time limit of one search."""

    whole: Traced
    options: Options
    clock: PhaseTimer
    profile: Cluster
    tables: dict[tuple[Any, ...], CostTable] = field(default_factory=dict)
    undecided: list[Undecided] = field(default_factory=list)

    def plan(self, graph: Graph, on: Mesh, wire: AxisLink, flying: int, rate: float) -> Plan:
        options = replace(self.options, memory_budget=AMPLE)
        with settled_heap(tidy=True):
            table = self._table(graph, on, wire, flying)
            if rate:
                return plan_at_rate(table, options, rate, clock=self.clock, undecided=self._undecided(table))
            with self.clock("formulate"):  # plans by hand are starts for where little fits; the first greedy plan is there if time is short
                formulation = formulate_within(table, AMPLE)
                program = with_starts(formulation, options.settings(graph.training, False), (next(iter(greedy_plans(formulation)))[1],))
            return decide(table, options, clock=self.clock, interruptible=False, finer=False, program=program, enough=ENOUGH)

    def run(self, graph: Graph, on: Mesh, shared: frozenset[str]) -> tuple[float, float]:
        with settled_heap(tidy=True):
            table = self._table(graph, on, None, floor=shared)
            with self.clock("bounds"):
                return least_run(table, self._how)

    def step(self, graph: Graph, on: Mesh, at: Prices | None, shared: frozenset[str]) -> tuple[float, Prices]:
        with settled_heap(tidy=True):
            table = self._table(graph, on, None, floor=shared)
            with self.clock("bounds"):
                return least_step(table, self._how, at)

    def stored(self, op: Op) -> float:
        parts = stored_alone(self.whole.graph, op, self.options)
        return float(parts["parameters"] + parts["optimizer"])

    @property
    def _how(self) -> How:
        return How(Clock(self.options.time_limit), self.options.search)

    def _table(self, graph: Graph, on: Mesh, wire: AxisLink | None, flying: int = 1, floor: frozenset[str] | None = None) -> CostTable:
        """Prices do not depend on what is in flight."""
        step = Training(self.options.optimizer, graph.training, offload=self.options.offload == "optimizer", wire=wire, in_flight=flying, floor=floor)
        key = id(graph), on, wire, floor  # a table has its graph, so that no other one gets its number
        found = self.tables.pop(key, None)
        if found is None:
            found = prices(replace(self.whole, graph=graph), on, self.options, clock=self.clock, profile=self.profile, step=step)
        self.tables[key] = found if found.training == step else replace(found, training=step)
        for oldest in list(self.tables)[:-TABLES]:
            del self.tables[oldest]
        return self.tables[key]

    def _undecided(self, table: CostTable) -> Undecided:
        found = next((known for known in self.undecided if known.table is table), None)
        if found is None:
            with self.clock("formulate"):
                found = Undecided.of(table, AMPLE)
            self.undecided = [*self.undecided, found][-OPEN:]
        return found


def stored_alone(graph: Graph, op: Op, options: Options) -> dict[str, int]:
    """Bytes of a parameter or buffer on one device that has all of it: parameters, gradients, optimizer state that is not on the host."""
    one = Mesh(("device",), (1,))
    parts = stored_parts(op.outputs[0], replicated(one), one, options.optimizer if op.name in trained_params(graph) else None)
    return {**parts, "optimizer": 0} if options.offload == "optimizer" else parts
