"""Why a choice was not made: force it, solve again, and show what changes."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autoshard import api
from autoshard.seeds.seeds import Seed
from autoshard.base.calling import Traced
from autoshard.study.diff import diff
from autoshard.errors import SeedError
from autoshard.study.explain import WhyNot
from autoshard.base.graph import Graph
from autoshard.base.mesh import Mesh
from autoshard.seeds.names import find_op, find_ops
from autoshard.decide.options import Options
from autoshard.base.plan import Plan


def why_not(traced: Traced, mesh: Mesh, options: Options, name: str, layout: str, *, plan: Plan | None = None,
            has_loss: bool = False, progress: Callable | None = None) -> WhyNot:
    """Solve with and without `name` laid out as `layout`. `name`: a parameter, an input, a module (its weight, where it has one,
    else what its last matmul makes) or an op. `plan`: the plan to compare with, else one is searched.

    Raises UsageError for a name nobody has, SeedError for a layout that is impossible, InfeasibleError where nothing fits."""
    clock = api.Clock(progress)
    table = api.prices(traced, mesh, options, clock=clock)
    key = seed_key(table.graph, name)
    if key in options.seeds:
        raise SeedError(f"{key} is held by a seed already ({options.seeds[key]}); change that one")
    forced = replace(options, seeds={**options.seeds, key: Seed(layout, "--why-not")})
    before = plan or api.decide(table, options, clock=clock, has_loss=has_loss)
    after = api.decide(api.prices(traced, mesh, forced, clock=clock), forced, clock=clock, has_loss=has_loss,
                       model_info=before.model)
    return WhyNot(key, layout, before.objective_s, after.objective_s, diff(before, after), (before.status, after.status))


def seed_key(graph: Graph, name: str) -> str:
    """The key of a seed on what `name` is."""
    params = {op.target for op in graph.of_kind("param")} | set(dict(graph.tied))
    if name in params or name.startswith(("input:", "output:")):
        return name
    if f"{name}.weight" in params:
        return f"{name}.weight"
    ops = find_ops(graph, name)
    return name if len(ops) == 1 else find_op(graph, name).name
