"""Planners for tests: they stand where the search stands."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from random_plans import random_plan

from autoshard.cost.cluster import load_cluster
from autoshard.cost.redistribute import Redistribution
from autoshard.base.plan import OpPlan, Plan


def random_planner(seed: int, outputs: str = "replicate") -> Callable[..., Plan]:
    """Legal, costly and different for every seed."""
    cluster = load_cluster("cpu-gloo")

    def planner(traced, mesh, *, stored, inputs) -> Plan:
        graph = traced.graph
        plan = random_plan(graph, mesh, Redistribution(mesh, cluster).steps, seed, stored, inputs, outputs)
        return replace(plan, cluster=cluster.snapshot())

    return planner


def whole_planner(traced, mesh, *, stored, inputs) -> Plan:
    """Everything whole on every rank: for a mesh of one."""
    graph, whole = traced.graph, (-1,) * mesh.ndim
    ops = {op.name: OpPlan((whole,) * len(op.refs), (whole,) * len(op.outputs)) for op in graph.ops}
    placements = {op.target: whole for op in graph.of_kind("param", "buffer")}
    return Plan(graph.hash, mesh, load_cluster("cpu-gloo").snapshot(), {}, {"training": graph.training}, ops, placements, (), (),
                (), {}, {}, 0.0, 0.0, 0.0, "hand-made")
