"""Planners for tests: they stand where the search stands."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from autoshard.base.plan import OpPlan, Plan, StagePlan
from autoshard.cost.cluster import load_cluster
from autoshard.cost.redistribute import Redistribution
from autoshard.decide.options import Options, Passing
from autoshard.lower.lower import Lowered
from autoshard.runtime.compile import Settings, Variant
from autoshard.runtime.step import Step
from tests.dist.random_plans import random_plan


def by_planner(planner: Callable[..., Plan], *, loss_fn: Any = None, plan: Plan | None = None, passing: Passing | None = None, key: str = "",
               once: dict[str, Lowered] | None = None, **options: Any) -> Settings:
    """As `autoshard.compile` has it, with `planner` in place of the search. `options`: others of `compile`. Models that are compiled several
    times with one `once`, which this fills, are lowered once and bound each time."""
    made = Options.of(options)

    def build(variant: Variant) -> Step:
        found = variant.agreed_plan(planner)
        known = {} if once is None else once
        if found.graph_hash not in known:
            known[found.graph_hash] = variant.lower(found, variant.schedule(found))
        return variant.bind(found, known[found.graph_hash])

    return Settings(build, made if passing is None else replace(made, passing=passing), loss_fn, plan, key)


def random_planner(seed: int, outputs: str = "replicate") -> Callable[..., Plan]:
    """Legal, costly and different for every seed."""
    cluster = load_cluster("cpu-gloo")

    def planner(traced, mesh, *, stored, inputs, pipeline=None) -> Plan:
        graph = traced.graph
        plan = random_plan(graph, mesh, Redistribution(mesh, cluster).steps, seed, stored, inputs, outputs)
        return replace(plan, cluster=cluster.snapshot())

    return planner


def whole_planner(traced, mesh, *, stored, inputs, pipeline=None) -> Plan:
    """Everything whole on every rank: for a mesh of one."""
    graph, whole = traced.graph, (-1,) * mesh.ndim
    ops = {op.name: OpPlan((whole,) * len(op.refs), (whole,) * len(op.outputs)) for op in graph.ops}
    placements = {op.target: whole for op in graph.of_kind("param", "buffer")}
    return Plan(graph.hash, mesh, load_cluster("cpu-gloo").snapshot(), {}, {"training": graph.training}, ops, placements, (), (),
                (), {}, (StagePlan(),), 0.0, 0.0, 0.0, "hand-made")
