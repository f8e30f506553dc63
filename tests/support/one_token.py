"""Plans of one call of a llama with caches, without its weights."""
from __future__ import annotations

from functools import cache

import torch

from autoshard.base.mesh import mesh_of
from autoshard.cost.cluster import load_cluster
from autoshard.decide.options import Options
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.planner.stages import plan_traced
from autoshard.program.trace import trace
from models.llama import decoder


def plan_of(model, given, mesh, cluster, memory=None, held=()):
    options = Options.of({"optimizer": "none", "cluster": cluster, "memory_budget": memory, "time_limit": 30.0}, seeds=dict(held))
    with torch.no_grad():
        traced = trace(model, given, training=False)
    return plan_traced(traced, mesh_of(mesh), options, clock=PhaseTimer(), profile=load_cluster(cluster))


@cache
def planned(mesh, batch=1, context=1024, cluster="h100-dgx", new=1, memory=None, held=(), **sizes):
    """The last `new` of `context` tokens, bfloat16."""
    with torch.device("meta"):
        model, inputs = decoder("8B", batch=batch, context=context, **sizes)
        given = inputs(new, context - new)
    return plan_of(model.bfloat16(), given, mesh, cluster, memory, held)


def seconds_of(layers, mesh, **how):
    """Layers repeat, so two sizes give all of them."""
    one, two = (planned(mesh, layers=n, **how).objective_s for n in (1, 2))
    return one + (layers - 1) * (two - one)


def kept(plan):
    """How keys and values lie."""
    return {spec for name, spec in plan.placements.items() if "keys" in name or "values" in name}
