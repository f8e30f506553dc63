"""Why a choice was not made: force it, solve again, and show what changes."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from autoshard.base.graph import Graph
from autoshard.base.mesh import Mesh
from autoshard.base.plan import Plan
from autoshard.decide.options import Options
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.errors import Interrupted, SeedError
from autoshard.planner.finer import plan_and_prices
from autoshard.planner.one_stage import decide, prices
from autoshard.program.calling import Traced
from autoshard.seeds.grammar import Seed, seed_text
from autoshard.seeds.names import find_op, find_ops
from autoshard.seeds.seeds import matching, named_by
from autoshard.study.diff import diff
from autoshard.study.explain import WhyNot


def why_not(traced: Traced, mesh: Mesh, options: Options, name: str, layout: str, *, plan: Plan | None = None,
            has_loss: bool = False, progress: Callable | None = None) -> WhyNot:
    """Solve with and without `name` laid out as `layout`. `name`: a parameter, an input, a module (its weight, where it has one,
    else what its last matmul makes) or an op. `plan`: the plan to compare with, else one is searched.

    Where a seed of the user holds it, that seed gives way: to `layout`, or to nothing where `layout` is what it says. So the answer is
    what the seed costs.

    Raises UsageError for a name nobody has, SeedError for a layout that is impossible, InfeasibleError where nothing fits, Interrupted
    on Ctrl-C in the first of the two searches."""
    clock = PhaseTimer(progress)
    key = seed_key(traced.graph, name)
    others, seed = released(traced.graph, options.seeds, key)
    same = bool(seed) and seed_text(layout) == seed
    forced = replace(options, seeds=others if same else {**others, key: Seed(layout, "--why-not")})
    before, _ = plan_and_prices(traced, mesh, options, plan, clock=clock, has_loss=has_loss)
    if before.interrupted and before is not plan:
        raise Interrupted(f"interrupted in the first of two searches: {before.objective_s:.4g} s a step so far, gap {before.gap:.2%}; "
                          "there is nothing yet to compare it with")
    after = decide(prices(traced, before.spec_mesh, forced, clock=clock), forced, clock=clock, has_loss=has_loss,
                       model_info=before.model)
    return WhyNot(key, layout, before.objective_s, after.objective_s, diff(before, after), (before.status, after.status), seed)


def released(graph: Graph, seeds: Mapping[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """The seeds without what they say about `key`, and the text of the seed that held it ("" where none did). A glob goes on to
    hold the others that it names. Raises SeedError for a seed on what leaves a module: it is part of the trace."""
    mine, out, held = {op.name for op in matching(graph, key)}, {}, ""
    for name, value in seeds.items():
        named = {k: op.name for k, op in named_by(graph, name).items()}
        if name != key and not mine & set(named.values()):
            out[name] = value
            continue
        if name == key and not named and name not in graph.by_name:
            raise SeedError(f"{key} is what a module returns and is held by a seed ({seed_text(value)}); change that seed, or leave it out")
        held = seed_text(value)
        out |= {k: value for k, op in named.items() if op not in mine and k not in seeds}
    return out, held


def seed_key(graph: Graph, name: str) -> str:
    """The key of a seed on what `name` is."""
    params = {op.target for op in graph.of_kind("param")} | set(dict(graph.tied))
    if name in params or name.startswith(("input:", "output:")):
        return name
    if f"{name}.weight" in params:
        return f"{name}.weight"
    ops = find_ops(graph, name)
    return name if len(ops) == 1 else find_op(graph, name).name
