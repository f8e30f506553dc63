"""The formulation against brute force that never sees a node, an edge or a copy node."""
from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from autoshard.base.graph import Graph, Ref
from autoshard.base.mesh import parse_mesh
from autoshard.base.plan import Copy, Plan
from autoshard.base.roles import Role
from autoshard.cost.cluster import load_cluster
from autoshard.decide.make_plan import Chosen, choose, make_plan, price
from autoshard.formulate.problem_of import formulate
from autoshard.program.accumulate import accumulating
from autoshard.program.trace import trace
from autoshard.search import Clock, solve
from autoshard.seeds.seeds import Seeds, resolve_seeds
from autoshard.space.cost_table import Training, build_cost_table
from autoshard.space.decision_units import find_units, singletons
from autoshard.space.strategies import enumerate_strategies


class Shared(nn.Module):
    """One value with three readers: the case in which per-edge prices would be wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 4))
        self.b = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x @ self.a) + x.cos() * (x @ self.b)).sum()


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.w).sum()


def table_of(model: nn.Module, x: torch.Tensor, mesh: str, cluster: str, training: bool, seeds=None, eta: float | None = None, microbatches: int = 1):
    graph = accumulating(trace(model, (x,), training=training).graph, microbatches, (0,), (("sum", 0),))
    profile = load_cluster(cluster)
    if eta is not None:
        profile = replace(profile, overlap=replace(profile.overlap, eta=eta, interference=0.05))
    m = parse_mesh(mesh)
    strategies = enumerate_strategies(graph, m, resolve_seeds(graph, m, seeds) if seeds else Seeds())
    return build_cost_table(graph, m, profile, strategies, Training("sgd", graph.training))


def brute_force(table, units) -> float:
    """Least price over every assignment of unit strategies, by the plan's own pricing; copies as cheap as they get."""
    graph: Graph = table.graph
    stored = {op.target: op.name for op in graph.of_kind("param")}
    best = np.inf

    @cache
    def can_move(ref: Ref, src, dst) -> bool:
        return bool(np.isfinite(_seconds(table, ref, src, dst)))

    def allowed(op, picked) -> bool:
        chosen = Chosen(table, picked, ())
        reachable = all(can_move(r, chosen.out_spec(r), chosen.in_spec(op.name, k))
                        for k, r in enumerate(op.refs) if r.op in picked)
        tied = op.kind == "output" and op.target.role is Role.GRADIENT
        return reachable and (not tied or chosen.in_spec(op.name, 0) == chosen.out_spec(Ref(stored[op.target.name])))

    def extend(i: int, picked: dict[str, int]) -> None:
        nonlocal best
        if i == len(units.units):
            best = min(best, total(table, picked))
            return
        unit = units.units[i]
        for s in range(len(unit)):
            grown = {**picked, **{m: int(p[s]) for m, p in zip(unit.members, unit.picked, strict=True)}}
            if all(allowed(graph.op(m), grown) for m in unit.members):
                extend(i + 1, grown)

    extend(0, {})
    return best


def _seconds(table, ref, src, dst) -> float:
    return float(table.redistribution.table(table.graph.meta(ref).logical_shape, table.graph.meta(ref).dtype, [src], [dst])[0, 0])


def total(table, picked: dict[str, int]) -> float:
    """Price of an assignment when every copy is made once: kept wherever forward made it already."""
    bare = Chosen(table, picked, ())
    copies = {}
    for op in table.graph.ops:
        for i, ref in enumerate(op.refs):
            src, dst = bare.out_spec(ref), bare.in_spec(op.name, i)
            if src != dst and (ref, op.phase, dst) not in copies:
                kept = op.phase == "backward" and (ref, "forward", dst) in copies
                copies[ref, op.phase, dst] = (ref, src, Copy(str(ref), op.phase, dst, "kept" if kept else "made"))
    return price(Chosen(table, picked, tuple(copies.values())))["step_s"]


@pytest.mark.parametrize("cluster, eta", [("h100-dgx", 0.0), ("cpu-gloo", None), ("h100-dgx", 0.7)])
@pytest.mark.parametrize("model, training", [(Chain(), True), (Shared(), False)])
@pytest.mark.parametrize("group", [singletons, find_units])
def test_optimum_equals_brute_force(model, training, cluster, eta, group):
    table = table_of(model, torch.randn(4, 4), "dp=2", cluster, training, eta=eta)
    table = cheap_links(table)
    units = group(table)
    formulation = formulate(table, units=units)
    solution = solve(formulation.problem, time_limit=30)
    plan = make_plan(formulation, solution, model={}, settings={}, seeds={})
    assert plan.objective_s == pytest.approx(brute_force(table, units), rel=1e-9)
    assert solution.cost == pytest.approx(plan.objective_s, rel=1e-9)


@pytest.mark.parametrize("group, eta, microbatches", [(singletons, 0.7, 2), (singletons, 0.0, 16), *product([find_units], [0.0, 0.7], [2, 16])])
def test_optimum_with_microbatches_equals_brute_force(group, eta, microbatches):
    """What runs once a step and what runs for every micro-batch, in every combination."""
    table = cheap_links(table_of(Chain(), torch.randn(4, 4), "dp=2", "h100-dgx", True, eta=eta, microbatches=microbatches))
    units = group(table)
    formulation = formulate(table, units=units)
    solution = solve(formulation.problem, time_limit=30)
    plan = make_plan(formulation, solution, model={}, settings={"training": True}, seeds={})
    assert plan.objective_s == pytest.approx(brute_force(table, units), rel=1e-9)
    assert solution.cost == pytest.approx(plan.objective_s, rel=1e-9)


def cheap_links(table):
    """The same table with compute 1000 times as dear, so that sharding pays and plans are not trivial."""
    dear = {name: replace(c, compute=c.compute * 1000 * np.linspace(1.0, 1.01, len(c.compute))) for name, c in table.ops.items()}
    return replace(table, ops=dear, _tables={})


def test_three_readers_pay_one_gather():
    seeds = {"input:0": ("dp", None), "a": (None, None), "b": (None, None)}
    table = table_of(Shared(), torch.randn(4, 4), "dp=2", "h100-dgx", False, seeds)
    replicated = {op.name: 0 for op in table.graph.ops}
    gather = _seconds(table, Ref(table.graph.of_kind("input")[0].name), (0,), (-1,))
    compute = sum(float(table.ops[op.name].compute[0]) for op in table.graph.ops)
    assert total(table, replicated) == pytest.approx(compute + gather, rel=1e-12)


def test_gradients_leave_in_the_stored_spec():
    table = table_of(Chain(), torch.randn(4, 4), "dp=2,tp=2", "h100-dgx", True, {"w": ("tp", "dp")})
    formulation = formulate(table)
    solution = solve(formulation.problem, time_limit=30)
    chosen = choose(formulation, solution)
    grad = table.graph.outputs(Role.GRADIENT)["w"]
    assert chosen.in_spec(grad.name, 0) == chosen.out_spec(Ref("param:w")) == (1, 0)


def test_plan_survives_a_round_trip_and_is_byte_for_byte_repeatable():
    def text() -> str:
        formulation = formulate(table_of(Chain(), torch.randn(4, 4), "dp=2,tp=2", "cpu-gloo", True))
        return make_plan(formulation, solve(formulation.problem, time_limit=30), model={"reference": "chain"},
                         settings={}, seeds={}).to_json()

    first = text()
    assert first == text()
    assert Plan.from_json(first).to_json() == first


def test_every_combination_of_strategies_is_priced_finitely_or_forbidden():
    table = table_of(Chain(), torch.randn(4, 4), "dp=2", "h100-dgx", False)
    sizes = [range(len(table.strategies[op.name])) for op in table.graph.ops]
    prices = [total(table, dict(zip((op.name for op in table.graph.ops), pick, strict=True)))
              for pick in product(*sizes) if _possible(table, pick)]
    assert prices and all(np.isfinite(prices))


def _possible(table, pick) -> bool:
    chosen = Chosen(table, dict(zip((op.name for op in table.graph.ops), pick, strict=True)), ())
    return all(np.isfinite(_seconds(table, r, chosen.out_spec(r), chosen.in_spec(op.name, i)))
               for op in table.graph.ops for i, r in enumerate(op.refs))


def test_units_lose_no_classic_plan():
    """Grouped and ungrouped ops reach the same optimum where a reduction, a gather and a residual join are in play."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + self.down(torch.relu(self.up(self.norm(x))))).square().mean()

    table = cheap_links(table_of(Block(), torch.randn(4, 4, 8), "tp=2", "h100-dgx", False))
    free, grouped = (solve(formulate(table, units=g(table)).problem, time_limit=30) for g in (singletons, find_units))
    assert grouped.cost == pytest.approx(free.cost, rel=2e-3)
    assert len(find_units(table).units) < len(singletons(table).units)


def test_a_plan_is_found_under_tight_memory():
    """Memory priced by secants: from the least-memory plan to one that fits and is as cheap as the exact search's."""
    from autoshard.decide.how import How
    from autoshard.decide.memory.fit import fit_memory
    from autoshard.decide.memory.memory_problems import least_memory
    from autoshard.decide.program import NOTHING
    from autoshard.search.problem import evaluate, row_loads

    table = table_of(Chain(), torch.randn(64, 4), "dp=2", "h100-dgx", True)
    rows = list(formulate(table, memory_limit=1e9).memory_rows.values())
    least = [solve(least_memory(formulate(table, memory_limit=1e9).problem, [row]), time_limit=10) for row in rows]
    limit = max(one.cost for one in least) * 1.05
    formulation = formulate(table, memory_limit=limit)
    found = fit_memory(formulation, NOTHING, How(Clock(30)))
    exact = solve(formulation.problem, time_limit=30)
    assert max(row_loads(formulation.problem, found.choice)[rows]) <= limit
    assert found.bound <= exact.cost * (1 + 1e-9) <= found.cost * (1 + 2e-9)
    assert evaluate(formulation.problem, found.choice) == pytest.approx(found.cost)
    assert fit_memory(formulate(table, memory_limit=1.0), NOTHING, How(Clock(30))) is NOTHING
