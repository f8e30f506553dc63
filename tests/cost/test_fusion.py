"""Chains of pointwise ops: charged once where the profile says that the backend fuses, one by one where not."""
from dataclasses import replace
from importlib import resources

import pytest
import torch
from torch import nn

from autoshard.base.graph import Ref
from autoshard.base.mesh import parse_mesh
from autoshard.cost.cluster import load_cluster
from autoshard.cost.fusion import fused
from autoshard.decide.options import Options
from autoshard.lower.lower import lower
from autoshard.lower.schedule import schedule
from autoshard.planner.stages import plan_traced
from autoshard.program.trace import trace
from autoshard.runtime.route import route_of
from autoshard.seeds.seeds import resolve_seeds
from autoshard.space.cost_table import Training, build_cost_table
from autoshard.space.strategies import enumerate_strategies
from autoshard.verification.reprice import reprice
from models import llama

N = 4096


class Chain(nn.Module):
    def forward(self, x, y):
        a = torch.sin(x)
        b = torch.exp(a)
        c = b * y
        return c + a, c.sum()


def graph_of(model, inputs, **options):
    return trace(model, inputs, **options).graph


@pytest.fixture(scope="module")
def chain():
    with torch.no_grad():
        return graph_of(Chain(), (torch.randn(N, N), torch.randn(N, N)), training=False)


def test_what_stays_in_registers(chain):
    """sin writes nothing: both its readers are in the chain; c is written, since the sum reads it."""
    found = fused(chain)
    by_op = {str(chain.op(name).target): part for name, part in found.items()}
    sin, exp, mul, add = (by_op[f"aten.{n}"] for n in ("sin.default", "exp.default", "mul.Tensor", "add.Tensor"))
    assert (set(sin.unread), set(sin.unwritten)) == (set(), {0})
    assert (set(exp.unread), set(exp.unwritten)) == ({0}, {0})
    assert (set(mul.unread), set(mul.unwritten)) == ({0}, set())
    assert (set(add.unread), set(add.unwritten)) == ({0, 1}, set())


def test_a_cast_is_part_of_a_chain():
    class Scaled(nn.Module):
        def forward(self, x):
            return (x.float() * 2.0).to(x.dtype)

    with torch.no_grad():
        found = fused(graph_of(Scaled(), (torch.randn(8, 8, dtype=torch.bfloat16),), training=False))
    assert [(set(part.unread), set(part.unwritten)) for part in found.values()] == [(set(), {0}), ({0}, {0}), ({0}, set())]


def test_a_chain_moves_what_goes_in_and_comes_out(chain):
    """x and y in, c and the result out: 4 matrices instead of 10."""
    mesh = parse_mesh("one=1")
    strategies = enumerate_strategies(chain, mesh, resolve_seeds(chain, mesh, {}), outputs="replicate")
    h100 = load_cluster("h100-dgx")

    def pointwise(cluster):
        table = build_cost_table(chain, mesh, cluster, strategies, Training("none", False))
        return sum(float(table.ops[name].compute[0]) for name in fused(chain))

    matrix = N * N * 4 / (3.35e12 * 0.85)
    assert pointwise(h100) == pytest.approx(10 * matrix)
    assert pointwise(replace(h100, device=replace(h100.device, fuses=True))) == pytest.approx(4 * matrix)


def test_a_fusing_plan_is_priced_as_its_lowered_program(tmp_path):
    text = resources.files("autoshard.cost").joinpath("clusters", "h100-dgx.toml").read_text()
    path = tmp_path / "fusing.toml"
    path.write_text(text.replace("[device]\n", "[device]\nfuses = true\n"))
    model, batch = llama.build()
    traced, mesh = trace(model, batch, loss_fn=llama.loss), parse_mesh("dp=2,tp=2")
    plan = plan_traced(traced, mesh, Options(cluster=str(path)), has_loss=True)
    graph = traced.graph
    cluster = load_cluster(path)
    assert cluster.device.fuses and plan.cluster["device"]["fuses"] is True
    lowered = lower(graph, plan, mesh, schedule(graph, plan, mesh, route_of(plan)))
    assert reprice(graph, lowered, cluster, "adamw").planned_s == pytest.approx(plan.objective_s, rel=1e-9)
    assert any(Ref(name, i) in graph.users for name, part in fused(graph).items() for i in part.unwritten)
