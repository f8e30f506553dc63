"""What a GiB more or less per rank would change: the model planned within neighbouring budgets.

A mixed integer program has no exact prices: its optimum is a staircase over the budget. So the price of memory is what it is to the user, the
difference between the best plans found a step of budget apart; each has a bound of its own, so the difference has, too.
"""
from __future__ import annotations

from dataclasses import replace
from math import floor, log2

from autoshard.base.mesh import Mesh
from autoshard.base.plan import Plan
from autoshard.base.worth import GIB, MemoryWorth, Neighbour
from autoshard.cost.cluster import load_cluster
from autoshard.decide.options import Options
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.errors import InfeasibleError, Interrupted, UsageError
from autoshard.planner.open_mesh import is_open
from autoshard.planner.workbench import Workbench

PART = 16
"""A step is a GiB, or below so many GiB about one part of so many."""


def step_of(limit: float) -> float:
    """The step of budget, in bytes, around a budget: a GiB, or a power of two of bytes."""
    return float(GIB) if limit >= PART * GIB else 2.0 ** floor(log2(limit / PART))


def with_worth(bench: Workbench, mesh: Mesh, options: Options, *, clock: PhaseTimer | None = None, step: float | None = None) -> Plan:
    """The plan, with what a step of budget more or less changes (`Plan.worth`). Budgets that cannot change the plan are not searched: less, where
    the plan needs no more than that; more, where no amount of memory makes a faster one. Ctrl-C ends it with what is known by then. Raises what
    `autoshard.plan` raises."""
    if is_open(mesh, options) or options.pipeline.stages(mesh) > 1:
        raise UsageError("what memory is worth is known for a mesh that is given, without pipeline stages, and a number of micro-batches")
    profile, clock = load_cluster(options.cluster), clock or PhaseTimer()
    plan = bench.plan(mesh, options, profile=profile, clock=clock)
    limit = options.memory_limit(profile)
    step = step or step_of(limit)
    known = plan.worth or MemoryWorth()
    if plan.interrupted:
        return plan
    clock.say("worth", "of memory")

    def within(budget: float) -> Neighbour | None:
        return _neighbour(bench, mesh, replace(options, memory_budget=budget), clock)

    def same(budget: float) -> Neighbour:
        return Neighbour(budget, plan.objective_s, plan.bound_s)

    more = within(limit + step) if known.binds(plan.objective_s) else same(limit + step)
    fits = (plan.memory["total"] or 0.0) <= limit - step
    less = same(limit - step) if fits else within(limit - step) if limit > step and more is not None else None
    faster = [n.step_s for n in (less,) if n is not None and n.step_s is not None]
    if faster and faster[0] < plan.objective_s:  # the search of a smaller budget found a plan that this one missed: it starts from it now
        plan = bench.plan(mesh, options, profile=profile, clock=clock)
    return replace(plan, worth=replace(plan.worth or known, less=less, more=more), timings=dict(clock.seconds))


def _neighbour(bench: Workbench, mesh: Mesh, options: Options, clock: PhaseTimer) -> Neighbour | None:
    """None where Ctrl-C ended it."""
    budget = options.memory_budget or 0.0
    try:
        plan = bench.plan(mesh, options, clock=clock.quiet())
    except InfeasibleError as e:
        return Neighbour(budget, None, why=str(e))
    except Interrupted:
        return None
    return None if plan.interrupted else Neighbour(budget, plan.objective_s, plan.bound_s)
