"""No choice costs more in the relaxed problem than as a plan, whatever prices and shares say; so what is proven there is a bound of all plans."""
from __future__ import annotations

import importlib
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from autoshard.base.mesh import parse_mesh
from autoshard.decide.options import Options
from autoshard.decide.pipeline_options import Pipeline
from autoshard.decide.program import starting_plans
from autoshard.formulate.problem_of import Formulation, formulate
from autoshard.formulate.relaxed import Relaxed, Shares, floor_of
from autoshard.pipeline.microbatches.batch import traced
from autoshard.planner.many_axes import least
from autoshard.planner.one_stage import prices
from autoshard.program.trace import trace
from autoshard.recompute.undecided import open_table
from autoshard.search import Edge, Problem, solve
from autoshard.search.problem import evaluate
from autoshard.space.cost_table import CostTable

CASES = [("gpt", "dp=2,tp=2", "cpu-gloo"), ("gpt", "dp=8,tp=8", "h100-dgx"), ("t5", "dp=2", "h100-dgx"), ("moe", "dp=2,tp=2", "h100-dgx"),
         ("llama", "a=2,b=2,c=2", "h100-dgx"), ("resnet", "dp=2", "cpu-gloo"), ("micro-batches", "dp=4", "h100-dgx")]

RANDOM = {"llama": (0, 0), "moe": (1, 0)}
"""Random choices of models with so much to choose that each takes half a minute: nothing recomputed, recomputation open."""


@cache
def table_of(name: str, mesh: str, cluster: str) -> CostTable:
    options = Options(cluster=cluster)
    if name == "micro-batches":
        model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).to("meta")
        batch = (torch.empty(512, 256, device="meta"), torch.empty(512, 256, device="meta"))
        found = traced(model, batch, {}, Pipeline(4), loss_fn=nn.functional.mse_loss, training=True)
    else:
        module = importlib.import_module(f"models.{name}")
        model, batch = module.build()
        found = trace(model, batch, loss_fn=module.loss)
    return prices(found, parse_mesh(mesh), options)


def random_choice(formulation: Formulation, seed: int) -> np.ndarray:
    """The best choice at other prices, of all nodes and of all edges."""
    rng, problem = np.random.default_rng(seed), formulation.problem
    costs = tuple(c * rng.uniform(0.1, 10.0) * rng.uniform(0.5, 2.0, len(c)) for c in problem.node_costs)
    edges = tuple(Edge(e.u, e.v, e.table * rng.uniform(0.01, 10.0), e.rows, e.cols) for e in problem.edges)
    found = solve(Problem(costs, edges), time_limit=120.0, enough=0.2)
    assert found.choice is not None, "a random plan exists"
    return found.choice


def random_shares(relaxed: Relaxed, rng: np.random.Generator) -> Shares:
    """Shares that add up to one for every spec of a value."""
    out = [[part * rng.uniform(0.0, 1.0, len(part)) for part in parts] for parts in relaxed.equal_shares()]
    for reads, parts in zip(relaxed.values, out, strict=True):
        sums: dict = {}
        for read, part in zip(reads, parts, strict=True):
            for spec, x in zip(read.specs, part, strict=True):
                sums[spec] = sums.get(spec, 0.0) + x
        for read, part in zip(reads, parts, strict=True):
            part /= [sums[spec] for spec in read.specs]
    return out


def of_units(relaxed: Relaxed, choice: np.ndarray) -> np.ndarray:
    """The choice among strategies that have partners; those of a plan do."""
    assert all(s in kept for kept, s in zip(relaxed.kept, choice, strict=False)), "a plan's strategies have partners"
    return np.array([int(np.searchsorted(kept, s)) for kept, s in zip(relaxed.kept, choice, strict=False)])


@pytest.mark.parametrize(("name", "mesh", "cluster"), CASES)
@pytest.mark.parametrize("is_open", [False, True], ids=["nothing recomputed", "recomputation open"])
def test_no_choice_costs_more_than_as_a_plan(name: str, mesh: str, cluster: str, is_open: bool) -> None:
    if is_open and name in ("resnet", "llama", "micro-batches"):
        pytest.skip("one program with open recomputation of each kind is enough")
    table = table_of(name, mesh, cluster)
    table = open_table(table) if is_open else table
    formulation, relaxed, rng = formulate(table), Relaxed(table), np.random.default_rng(7)
    closest, seeds = 0.0, range(RANDOM.get(name, (3, 1))[is_open])
    for seed, choice in enumerate((*(random_choice(formulation, seed) for seed in seeds), *starting_plans(formulation))):
        cost, units = evaluate(formulation.problem, choice), of_units(relaxed, choice)
        for shares in (relaxed.equal_shares(), random_shares(relaxed, rng)):
            for share in (0.0, 0.5, 1.0):
                got = evaluate(relaxed.problem([share * relaxed.most] * relaxed.windows, shares), units)
                assert got <= cost * (1 + 1e-9), f"choice {seed}, prices of rows {share}"
                closest = max(closest, got / cost)
    assert closest > 0.5, "and not much less"


@pytest.mark.parametrize(("name", "mesh", "cluster"), [case for case in CASES if case[0] != "resnet"])
def test_the_floor_is_below_the_best_plan_and_close_to_it(name: str, mesh: str, cluster: str) -> None:
    table = table_of(name, mesh, cluster)
    solution = solve(formulate(table).problem, time_limit=60.0)
    floor = floor_of(Relaxed(table)).seconds
    assert least(table) < floor <= solution.cost * (1 + 1e-9)
    assert solution.cost - floor < 0.5 * (solution.cost - least(table)) or solution.cost - floor < 0.03 * solution.cost


def test_moved_shares_raise_the_floor() -> None:
    """Layouts of readers differ in t5, so equal shares leave some of what moves unpaid."""
    relaxed = Relaxed(table_of("t5", "dp=2", "h100-dgx"))
    assert floor_of(relaxed).seconds > floor_of(relaxed, lambda: True).seconds * (1 + 1e-4)
