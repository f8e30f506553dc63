"""`autoshard.simulate`: a plan as it runs on all ranks of its mesh."""
from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from autoshard.base.graph import Graph
from autoshard.base.mesh import mesh_of
from autoshard.base.plan import Plan
from autoshard.cost.cluster import Cluster, load_cluster
from autoshard.decide.options import planned_under
from autoshard.lower.schedule import schedule
from autoshard.recompute.rewrite import with_recompute
from autoshard.runtime.check_plan import check_fits
from autoshard.runtime.route import route_of
from autoshard.simulation.conditions import Conditions, check_rank
from autoshard.simulation.critical_path import critical_path, shares
from autoshard.simulation.events import play
from autoshard.simulation.flops import executed_seconds, model_seconds
from autoshard.simulation.program import Program, check_loads, program_of
from autoshard.simulation.replay import Replay
from autoshard.simulation.result import Simulation, idle_rows, stamped
from autoshard.simulation.scale import at_scale
from autoshard.simulation.source import traced_for
from autoshard.simulation.trace import tracks_of
from autoshard.simulation.traffic import link_use, over_time, sendings, sizes


def simulate(plan: Plan | str | os.PathLike[str], model: nn.Module | None = None, example_inputs: Sequence[Any] = (),
             example_kwargs: Mapping[str, Any] | None = None, *, loss_fn: Callable[..., Any] | None = None, executed: bool = False,
             mesh: Any = None, batch: int | None = None, cluster: Cluster | str | os.PathLike[str] | None = None,
             slow_ranks: Mapping[int, float] | None = None, slow_links: Mapping[str, float] | None = None, shared_links: bool = False,
             expert_load: Mapping[int, float] | None = None, jitter: float = 0.0, varied: float = 0.0, seed: int = 0,
             ranks: Sequence[int] = ()) -> Simulation:
    """The step of `plan`, event by event on all ranks: who waits for whom, what is exposed, which link is used how much.

    plan        a Plan or its file
    model       what it was made for, with the same inputs and loss; None: the model that the plan names ("llama:8b")
    executed    small gradients share calls, as it runs; by default each is reduced by itself, as the objective prices it
    mesh        the same placements on a mesh with the same axes and other sizes; batch: with another global batch (of a model that the plan
                names: with a `model` of yours give other inputs). Nothing is searched
    cluster     at the prices of another machine: a profile's name or file. Default: the one that it was planned for
    slow_ranks  {rank: how many times as long its work takes}
    slow_links  {"nvlink": share of its bandwidth that is left}; "infiniband@3": of the ranks of node 3
    shared_links  collectives that run at the same time share the links they use, max-min fair; default: each has all of them
    expert_load  {rank: tokens' rows that come to its experts, over those of an even load}; the rest of its group shares what is left
    jitter      relative standard deviation of work, per rank and stretch between two collectives
    varied      relative standard deviation of what ranks take for the same work, drawn once per rank: devices of one kind are not equally fast
    seed        of the random numbers of both
    ranks       those to keep tracks of, for a trace; default: one of each class of ranks that did the same

    No process is started and no number computed. Raises PlanError for a plan of another model, ClusterError for a cluster that is not known or has
    too few devices, UsageError for ranks, links and nodes that are not there, for loads of experts where the plan splits none, and for a mesh that
    the placements do not divide over, and what loading and tracing the model raise."""
    conditions = Conditions(dict(slow_ranks or {}), dict(slow_links or {}), dict(expert_load or {}), jitter, seed, shared_links, varied)
    found = plan if isinstance(plan, Plan) else Plan.load(plan)
    if cluster is not None:
        other = load_cluster(cluster).snapshot()
        found = replace(found, cluster=other, objective_s=found.objective_s if other == found.cluster else 0.0)
    machine, on = Cluster.from_snapshot(found.cluster), found.mesh if mesh is None else mesh_of(mesh)
    machine.links_for(on)
    conditions.check(on, machine)
    for rank in ranks:
        check_rank(rank, on)
    graph = traced_for(found, model, example_inputs, example_kwargs, loss_fn, batch).graph
    if mesh is not None or batch is not None:
        found = at_scale(found, graph, on)
    if planned_under(found)["pipeline"].stages(found.mesh) > 1:
        from autoshard.simulation.pipeline import simulate_pipeline

        return simulate_pipeline(graph, found, machine, conditions, executed, ranks)
    check_fits(found, graph, found.mesh)
    graph = with_recompute(graph, found.recompute)
    program = program_for(graph, found, machine, executed)
    if conditions.expert_load:
        check_loads(program.works)
    played = play(program, machine, conditions)
    return _result(graph, found, machine, conditions, executed, played, ranks)


def program_for(graph: Graph, plan: Plan, cluster: Cluster, executed: bool = False) -> Program:
    """The program of a plan without stages. `graph`: with what backward recomputes."""
    order = schedule(graph, plan, plan.spec_mesh, route_of(plan))
    return program_of(graph, plan, order, cluster, executed=executed)


def _result(graph: Graph, plan: Plan, cluster: Cluster, conditions: Conditions, executed: bool, played: Replay, ranks: Sequence[int]) -> Simulation:
    step, n, calls = played.step_s, plan.mesh.size, played.program.calls
    return Simulation(
        plan, conditions, executed, step, work_s=float(played.worked.mean()), slowed_s=float(played.slowed.mean()),
        slowest=int(played.finish.argmax()), fastest_s=float(played.finish.min()), idle=idle_rows(played.idle),
        critical=shares(played, critical_path(played)), links=link_use((c.phases for c in calls), step), sizes=sizes(calls),
        memory=stamped(plan.stages[0].timeline, played), mfu=model_seconds(graph, plan, cluster.device) / n / step,
        hfu=executed_seconds(graph, plan, cluster.device) / step, make_tracks=lambda: tracks_of(played, ranks),
        traffic=over_time(sendings(played), step) if step else ())
