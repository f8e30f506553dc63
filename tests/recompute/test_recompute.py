"""Backward that runs parts of forward again: same graph otherwise, same price when lowered, less memory, same values."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autoshard.base.graph import Ref
from autoshard.base.mesh import parse_mesh
from autoshard.base.plan import RECOMPUTE_SUFFIX, Plan
from autoshard.cost.cluster import load_cluster
from autoshard.decide.options import Options
from autoshard.lower.lower import lower
from autoshard.lower.schedule import schedule
from autoshard.planner.one_stage import decide, prices
from autoshard.program.calling import Traced
from autoshard.program.interpret import run
from autoshard.program.trace import trace
from autoshard.recompute.rewrite import candidates, with_recompute
from autoshard.rules.family import Family
from autoshard.runtime.route import route_of
from autoshard.verification.reprice import reprice
from models import gpt, llama

SETS = [pytest.param([f for f in Family if f.cheap], id="cheap ops"), pytest.param(list(Family), id="all but the residual stream")]


def traced_of(module, **sizes) -> tuple[Traced, torch.nn.Module, tuple]:
    torch.manual_seed(0)
    model, batch = module.build(**sizes)
    found = trace(model, batch, loss_fn=module.loss)
    return found, model, batch


@pytest.mark.parametrize("module", [gpt, llama])
@pytest.mark.parametrize("families", SETS)
def test_gradients_are_bit_for_bit_the_same(module, families) -> None:
    traced, model, batch = traced_of(module)
    graph = with_recompute(traced.graph, candidates(traced.graph, families))
    again = [op for op in graph.ops if op.name.endswith(RECOMPUTE_SUFFIX)]
    assert again and all(op.phase == "backward" for op in again)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    one, two = run(traced, state, batch), run(Traced(graph, traced.calling), state, batch)
    assert all(torch.equal(one.grads[n], two.grads[n]) for n in one.grads)


@pytest.mark.parametrize("families", SETS)
def test_only_what_backward_needs_is_run_again_and_once(families) -> None:
    graph = traced_of(gpt)[0].graph
    names = candidates(graph, families)
    again = with_recompute(graph, names)
    made = [op.name for op in again.ops if op.name.endswith(RECOMPUTE_SUFFIX)]
    assert len(made) == len(set(made))
    assert all(any(again.users.get(Ref(n, k)) for k in range(len(again.op(n).outputs))) for n in made)
    used = [n.removesuffix(RECOMPUTE_SUFFIX) for n in made]
    assert with_recompute(graph, used).hash == again.hash
    assert with_recompute(graph, ()) is graph


def test_random_ops_are_kept() -> None:
    graph = traced_of(gpt, dropout=0.1)[0].graph
    dropouts = {op.name for op in graph.ops if "dropout" in str(op.target) and op.phase == "forward"}
    assert dropouts and not dropouts & set(candidates(graph))


def test_a_plan_that_recomputes_fits_round_trips_and_costs_what_it_says() -> None:
    sizes = {"batch": 32, "seq": 32, "layers": 4}
    model, batch = llama.build(**sizes)
    traced, mesh, options = trace(model, batch, loss_fn=llama.loss), parse_mesh("dp=2"), Options(cluster="h100-dgx", time_limit=120.0)
    table = prices(traced, mesh, options)
    free = decide(table, options, has_loss=True)
    budget = 0.5 * free.memory["total"]
    plan = decide(table, replace(options, memory_budget=budget), has_loss=True, finer=False, enough=0.5)  # what follows holds for every plan that fits
    assert plan.recompute and plan.memory["total"] <= budget and plan.objective_s > free.objective_s
    assert plan.graph_hash == free.graph_hash and Plan.from_json(plan.to_json()) == plan
    graph = with_recompute(traced.graph, plan.recompute)
    lowered = lower(graph, plan, mesh, schedule(graph, plan, mesh, route_of(plan)))
    assert reprice(graph, lowered, load_cluster("h100-dgx"), "adamw").planned_s == pytest.approx(plan.objective_s, rel=1e-9)
