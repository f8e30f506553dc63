"""One program on one mesh: what everything costs, and the decision."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from autoshard.base.graph import Graph
from autoshard.base.mesh import Mesh
from autoshard.base.plan import OpPlan, Plan
from autoshard.base.spec import Spec
from autoshard.cost.cluster import Cluster, load_cluster
from autoshard.decide.backends import Found, find
from autoshard.decide.how import How
from autoshard.decide.options import PROPAGATE, Options
from autoshard.decide.passed_inputs import as_passed
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.decide.program import Program, formulate_within, with_starts
from autoshard.decide.refine import may_refine
from autoshard.decide.walks.lift import Layouts, lifts
from autoshard.errors import InfeasibleError, Interrupted, UsageError
from autoshard.formulate.relaxed import floor_of
from autoshard.planner.descent import CLOSE, LEAST, Descent, Left
from autoshard.planner.many_axes import as_near, coarse_of, has_many, has_some, least, on_fewer_axes, relaxed
from autoshard.program.calling import Traced
from autoshard.search import Clock
from autoshard.search.interrupt import stopping
from autoshard.search.problem import Problem, Seen, Solution, Status, seen
from autoshard.seeds.held import holding
from autoshard.seeds.seeds import Seeds, resolve_seeds
from autoshard.space.cost_table import CostTable, Training, build_cost_table
from autoshard.space.reachable import reachable
from autoshard.space.strategies import enumerate_strategies

COARSE = 0.8
"""Share of the time left for a plan for fewer axes, where there are many: what is near it is cheaper by tenths of a percent."""
SOON = 0.01
"""Of the bound of all plans, within which another search near a plan may close it; else all strategies are searched."""
FAR = 0.05
"""Of the bound of all plans, above which a plan on many axes is looked for in another way too."""


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
             program: Program | None = None, coarser: Sequence[Plan | Layouts] = ()) -> Found:
    """Formulate and search. In training, where the best plan with ample memory does not
    fit, the search also decides what backward recomputes instead of keeping it. `interruptible`: Ctrl-C ends the search with the
    best plan so far, whose status says so. `finer`, `enough`, `known`: see `How`. `program`: that of `table` (`program_of`), within any
    budget, where it was made already. `coarser`: plans, of which those of the same program on meshes that this one refines are starts. Raises
    InfeasibleError, and Interrupted where there is no plan yet.

    On many mesh axes strategies near layouts that are close to a bound of all plans are searched, alone or beside all of them: see many_axes.py."""
    how = {"clock": clock, "has_loss": has_loss, "interruptible": interruptible, "enough": enough, "known": known}
    if options.search != PROPAGATE and has_many(table):
        return _searched_near(table, options, program, finer=finer, coarser=coarser, **how)
    if options.search != PROPAGATE and has_some(table):
        return _searched_both(table, options, program, finer=finer, coarser=coarser, **how)
    return _searched_whole(table, options, program, finer=finer, coarser=coarser, **how)


def _searched_whole(table: CostTable, options: Options, program: Program | None = None, *, clock: PhaseTimer, has_loss: bool, interruptible: bool,
                    finer: bool, coarser: Sequence[Plan | Layouts], enough: float, known: dict[str, Solution] | None,
                    near: Found | None = None) -> Found:
    """`near`: of some of the strategies, which guesses prices of the rows."""
    limit = options.memory_limit(table.cluster)
    with clock("formulate"):
        program = (program or program_of(table, options, has_loss=has_loss)).within(limit)
        program = replace(program, starts=(*program.starts, *lifts(program.formulation, coarser)))
        if near is not None:
            program.learned.seen = _seen_by(near, program.formulation.problem)
    how = How(Clock(options.time_limit), options.search, clock.search, finer, enough, {} if known is None else known)
    with _searching(how.clock, clock, interruptible):
        return find(program, how)


def _seen_by(near: Found, whole: Problem) -> tuple[Seen, ...]:
    """What tells the prices of the whole problem's rows; nothing where the plan has other rows, or was refined op by op."""
    problem = near.program.formulation.problem
    if len(problem.row_limit) != len(whole.row_limit):
        return ()
    return seen(problem, [choice for choice in near.solution.near if len(choice) == problem.n])


@contextmanager
def _searching(limit: Clock, clock: PhaseTimer, interruptible: bool) -> Iterator[None]:
    """A search that Ctrl-C ends by `limit`; `clock` remembers that it did."""
    with stopping(limit, interruptible), clock("search"):
        try:
            yield
        finally:
            if limit.stopped:
                clock.ended.set()


def _searched_both(table: CostTable, options: Options, program: Program | None, *, clock: PhaseTimer, finer: bool, coarser: Sequence[Plan | Layouts],
                   **how: Any) -> Found:
    """`searched`, of strategies near layouts that are close to the bound of all plans; and where the best of these costs more than that, of all
    strategies from there on."""
    left, enough = Left(clock, options.time_limit), max(CLOSE, how["enough"])
    steps, layouts = _near_bound(table, options, left, clock=clock, finer=finer, coarser=coarser, **how)
    near = steps.from_layouts(layouts, SOON)
    if near is not None and (steps.stopped or left.over and not coarser or near.solution.cost <= (1.0 + enough) * steps.bound):
        return as_near(near, steps.bound, None, steps.stopped)
    starts = (*coarser, *([near.plan(table, {}, {})] if near else []))
    try:
        found = _searched_whole(table, replace(options, time_limit=left.seconds), program, clock=clock, finer=finer, coarser=starts, near=near, **how)
    except (InfeasibleError, Interrupted) as e:  # a plan that was refined op by op is no start over units
        if near is None:
            raise
        return as_near(near, steps.bound, None, isinstance(e, Interrupted))
    bound = max(steps.bound, found.solution.bound)
    if near is not None and near.solution.cost < found.solution.cost:
        return as_near(near, bound, None, found.solution.status is Status.INTERRUPTED)
    return replace(found, solution=replace(found.solution, bound=min(bound, found.solution.cost)))


def _searched_near(table: CostTable, options: Options, program: Program | None, *, clock: PhaseTimer, **how: Any) -> Found:
    """`searched`, of strategies near layouts that are close to the bound of all plans; where that leads nowhere, of those near a plan for fewer
    axes. `program`: what is known of it by hand may be cheaper."""
    steps, layouts = _near_bound(table, options, Left(clock, options.time_limit), clock=clock, **how)
    found = steps.from_layouts(layouts)
    if found is None or not steps.stopped and found.solution.cost > (1.0 + FAR) * steps.bound:
        found = min(filter(None, (_near_fewer_axes(steps, options, found, clock=clock, **how), found)), key=lambda f: f.solution.cost)
    return as_near(found, steps.bound, program and program.within(options.memory_limit(table.cluster)), steps.stopped)


def _near_bound(table: CostTable, options: Options, left: Left, *, clock: PhaseTimer, finer: bool,
                coarser: Sequence[Plan | Layouts], **how: Any) -> tuple[Descent, Mapping[str, OpPlan]]:
    """What searches near known layouts, with the bound of all plans; and layouts that cost little more but for memory, none where nothing goes
    together, of which the search says why."""
    finer = finer and may_refine(table)  # also where strategies near layouts are few

    def search(near: CostTable, seconds: float, starts: Sequence[Plan | Layouts]) -> Found:
        return _searched_whole(near, replace(options, time_limit=seconds), clock=clock, finer=finer, coarser=(*coarser, *starts),
                               **{**how, "enough": max(how["enough"], CLOSE)})

    clock.say("axes", f"what no plan on mesh {table.mesh} is below: there are too many strategies to search all of them soon")
    with clock("formulate"):
        found = relaxed(table)
    if found is None:
        return Descent(table, least(table), search, left, clock.say), {}
    limit = Clock(left.seconds)
    with _searching(limit, clock, how["interruptible"]):
        floor = floor_of(found, limit.expired)
    steps = Descent(table, max(least(table), floor.seconds), search, left, clock.say, limit.stopped)
    return steps, found.layouts(floor.choice)


def _near_fewer_axes(steps: Descent, options: Options, other: Found | None, *, clock: PhaseTimer, **how: Any) -> Found | None:
    """The best strategies near a plan for fewer axes. Where none fits: None where there is an `other` plan, else raises InfeasibleError."""
    table, coarse = steps.table, coarse_of(steps.table)
    clock.say("axes", f"a plan for mesh {coarse.mesh}")
    seconds = LEAST if steps.stopped else COARSE * steps.left.seconds
    try:
        there = on_fewer_axes(table, coarse, options.passing.outputs)
        found = searched(there, replace(options, time_limit=seconds), clock=clock, **{**how, "finer": False, "coarser": ()})
        return steps.from_plan(found.plan(there, {}, {}), coarse)
    except InfeasibleError as e:
        if other is not None:
            return None
        raise InfeasibleError(f"{e}\n(on mesh {table.mesh} only strategies near a plan for {coarse.mesh} were searched: others may fit)") from None
