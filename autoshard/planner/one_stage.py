"""One program on one mesh: what everything costs, and the decision."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoshard.base.graph import Graph
from autoshard.base.mesh import Mesh
from autoshard.base.plan import Plan
from autoshard.base.spec import Spec
from autoshard.cost.cluster import Cluster, load_cluster
from autoshard.decide.backends import Found, find
from autoshard.decide.how import How
from autoshard.decide.options import PROPAGATE, Options
from autoshard.decide.passed_inputs import as_passed
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.decide.program import Program, formulate_within, with_starts
from autoshard.decide.walks.lift import lifts
from autoshard.errors import InfeasibleError, UsageError
from autoshard.formulate.relaxed import floor_of
from autoshard.planner.many_axes import as_near, coarse_of, has_many, least, near, on_fewer_axes, relaxed
from autoshard.program.calling import Traced
from autoshard.search import Clock
from autoshard.search.interrupt import stopping
from autoshard.search.problem import Solution
from autoshard.seeds.held import holding
from autoshard.seeds.seeds import Seeds, resolve_seeds
from autoshard.space.cost_table import CostTable, Training, build_cost_table
from autoshard.space.reachable import reachable
from autoshard.space.strategies import enumerate_strategies

COARSE = 0.8
"""Share of the time limit for a plan for fewer axes, where there are many: what is near it is cheaper by tenths of a percent."""
LEAST = 1.0
"""Seconds at least for a search near it."""
WORTH = 5e-3
"""Share of a step by which it has to be shorter for another search to be worth its time."""


def prices(traced: Traced, mesh: Mesh, options: Options, *, clock: PhaseTimer | None = None, fixed: Mapping[str, Spec] | None = None,
           profile: Cluster | None = None, step: Training | None = None, like: CostTable | None = None) -> CostTable:
    """What every strategy and every change of layout costs; explaining and comparing plans start from here too. `step`: of a stage of a
    pipeline, what a step does besides the graph. `like`: prices of the same graph on the same mesh with the same options, by another profile,
    of which only these differ. On a `FineMesh` seeds and `fixed` are about the user's axes. Raises UsageError for a mesh with an axis of stages: each
    of them has prices of its own."""
    if step is None and options.pipeline.stages(mesh) > 1:
        raise UsageError(f"this looks at the program of one stage, and axis {options.pipeline.axis!r} of mesh {mesh} cuts the model into several; "
                         "leave that axis out of the mesh here (`autoshard plan` and `autoshard verify` take it)")
    graph, profile, clock = traced.graph, profile or load_cluster(options.cluster), clock or PhaseTimer()
    if like is not None and not like.training.offload:  # with offload, strategies depend on the profile's host link
        with clock("costs"):
            return replace(build_cost_table(graph, mesh, profile, like.strategies, like.training), seeds=like.seeds)
    with clock("strategies"):
        seeds = _seeds(graph, mesh, options, fixed or {}) if step is None else seeds_of_stage(graph, mesh, options, fixed or {})
        strategies = reachable(graph, enumerate_strategies(graph, mesh, seeds, outputs=options.passing.outputs))
    with clock("costs"):
        step = step or Training(options.optimizer, graph.training, offload=options.offload == "optimizer")
        return replace(build_cost_table(graph, mesh, profile, strategies, step), seeds=seeds)


def _seeds(graph: Graph, mesh: Mesh, options: Options, fixed: Mapping[str, Spec]) -> Seeds:
    seeds = resolve_seeds(graph, mesh.whole, options.seeds)
    passed = as_passed(graph, mesh.whole, options.passing, seeds.specs)
    return holding(seeds, graph, {**passed, **fixed}).on(mesh)


def seeds_of_stage(graph: Graph, mesh: Mesh, options: Options, fixed: Mapping[str, Spec]) -> Seeds:
    """What the user's seeds, and placements that are `fixed`, say about the graph of a stage."""
    return holding(resolve_seeds(graph, mesh.whole, options.seeds, stage=True), graph, fixed).on(mesh)


def program_of(table: CostTable, options: Options, *, has_loss: bool = False) -> Program:
    """What `decide` decides about, for those who decide more than once: with other budgets, say."""
    return with_starts(formulate_within(table, options.memory_limit(table.cluster)), options.settings(table.graph.training, has_loss))


def decide(table: CostTable, options: Options, *, clock: PhaseTimer | None = None, has_loss: bool = False,
           model_info: Mapping[str, Any] | None = None, **how: Any) -> Plan:
    """`searched`, and the plan read from the solution. `how`: see there."""
    clock = clock or PhaseTimer()
    found = searched(table, options, clock=clock, has_loss=has_loss, **how)
    with clock("assemble"):
        plan = found.plan(table, model_info or {}, options.marks)
    return replace(plan, timings=dict(clock.seconds))


def searched(table: CostTable, options: Options, *, clock: PhaseTimer, has_loss: bool = False, interruptible: bool = True,
             finer: bool = True, enough: float = 0.0, known: dict[str, Solution] | None = None,
             program: Program | None = None, coarser: Sequence[Plan] = ()) -> Found:
    """Formulate and search. In training, where the best plan with ample memory does not
    fit, the search also decides what backward recomputes instead of keeping it. `interruptible`: Ctrl-C ends the search with the
    best plan so far, whose status says so. `finer`, `enough`, `known`: see `How`. `program`: that of `table` (`program_of`), within any
    budget, where it was made already. `coarser`: plans, of which those of the same program on meshes that this one refines are starts. Raises
    InfeasibleError, and Interrupted where there is no plan yet.

    On many mesh axes strategies near a plan for fewer axes are searched: see many_axes.py."""
    how = {"clock": clock, "has_loss": has_loss, "interruptible": interruptible, "enough": enough, "known": known}
    if options.search != PROPAGATE and has_many(table):
        return _searched_near(table, options, program, finer=finer, coarser=coarser, **how)
    return _searched_whole(table, options, program, finer=finer, coarser=coarser, **how)


def _searched_whole(table: CostTable, options: Options, program: Program | None = None, *, clock: PhaseTimer, has_loss: bool, interruptible: bool,
                    finer: bool, coarser: Sequence[Plan], enough: float, known: dict[str, Solution] | None) -> Found:
    limit = options.memory_limit(table.cluster)
    with clock("formulate"):
        program = (program or program_of(table, options, has_loss=has_loss)).within(limit)
        program = replace(program, starts=(*program.starts, *lifts(program.formulation, coarser)))
    how = How(Clock(options.time_limit), options.search, clock.search, finer, enough, {} if known is None else known)
    with stopping(how.clock, interruptible), clock("search"):
        return find(program, how)


def _searched_near(table: CostTable, options: Options, program: Program | None, *, clock: PhaseTimer, finer: bool, coarser: Sequence[Plan],
                   **how: Any) -> Found:
    """`searched`, of strategies near a plan for fewer axes, which is planned first within a share of the time, then of those near what was found,
    while that makes steps shorter. `program`: what is known of it by hand may be cheaper."""
    coarse, left = coarse_of(table), _Left(clock, options.time_limit)
    clock.say("axes", f"a plan for mesh {coarse.mesh} first: on {table.mesh} there are too many strategies to search all of them")
    try:
        there = on_fewer_axes(table, coarse, options.passing.outputs)
        found = searched(there, replace(options, time_limit=COARSE * options.time_limit), clock=clock, finer=False, **how)
        plan, parts, again = found.plan(there, {}, {}), coarse.parts, True
        bound, ended = (least(table), True) if plan.interrupted else _bound_of_all(table, clock, left, how["interruptible"])
        while again:
            clock.say("axes", f"{plan.objective_s:.6g} s on mesh {plan.spec_mesh}; now strategies near that plan on {table.mesh}")
            stopped, before = ended or plan.interrupted, plan.objective_s
            within = replace(options, time_limit=LEAST if stopped else left.seconds)
            found = _searched_whole(near(table, parts, plan), within, clock=clock, finer=finer, coarser=(*coarser, plan), **how)
            plan, parts = found.plan(table, {}, {}), tuple(range(table.mesh.ndim))
            again = plan.objective_s < (1.0 - WORTH) * before and left.seconds > LEAST and not (stopped or plan.interrupted)
    except InfeasibleError as e:
        raise InfeasibleError(f"{e}\n(on mesh {table.mesh} only strategies near a plan for {coarse.mesh} were searched: others may fit)") from None
    return as_near(found, coarse, bound, program and program.within(options.memory_limit(table.cluster)), stopped)


def _bound_of_all(table: CostTable, clock: PhaseTimer, left: _Left, interruptible: bool) -> tuple[float, bool]:
    """Seconds of a step that no plan is below, and whether the user ended the search meanwhile."""
    clock.say("axes", f"what no plan on {table.mesh} is below")
    with clock("formulate"):
        found = relaxed(table)
    limit = Clock(left.seconds)
    with stopping(limit, interruptible), clock("search"):
        return max(least(table), floor_of(found, limit.expired) if found else 0.0), limit.stopped


class _Left:
    """Seconds that searches may still take, at least `LEAST`."""

    def __init__(self, clock: PhaseTimer, limit: float) -> None:
        self._clock, self._end = clock, clock.seconds.get("search", 0.0) + limit

    @property
    def seconds(self) -> float:
        return max(LEAST, self._end - self._clock.seconds.get("search", 0.0))
