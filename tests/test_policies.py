"""What a precision policy asks for costs no plan: gradients are summed in its dtype, and a narrower one is never dearer."""
from __future__ import annotations

import importlib
from functools import cache

import pytest
import torch
from torch import nn

from autoshard import Precision
from autoshard.api import mesh_of
from autoshard.base.graph import Ref
from autoshard.base.roles import Role
from autoshard.cli.read import parse_precision
from autoshard.decide.options import Options
from autoshard.planner.stages import plan_traced
from autoshard.program.flow import casts_of_parts, reduction_dtypes
from autoshard.program.trace import trace

BATCH = 4096
"""So many samples that tiny models are split over the batch."""
FAST = ("mlp", "gpt", "llama")
SLOW = ("vit", "resnet", "moe", "t5", "dlrm")
OPEN = {"bert": 1e-2}
"""The gap of a search that does not close in the time given; it finds its plan early, its bound rises slowly."""


@cache
def program(name: str, reduce: str, batch: int = BATCH, param: str = "bf16"):
    module = importlib.import_module(f"models.{name}")
    with torch.device("meta"):
        model, inputs = module.build("tiny", batch=batch)
    return trace(model, inputs, loss_fn=module.loss, training=True, precision=Precision(param=param, reduce=reduce))


def planned(name: str, mesh: str, reduce: str, **shape):
    policy = parse_precision(f"param=bf16,master=fp32,reduce={reduce}")
    return plan_traced(program(name, reduce, **shape), mesh_of(mesh), Options(precision=policy, time_limit=600), has_loss=True)


def cases():
    for mesh in ("dp=8", "dp=2,tp=4"):
        for name in (*FAST, *SLOW):
            fast = name in FAST and (mesh == "dp=8" or name == "mlp")
            yield pytest.param(name, mesh, marks=() if fast else pytest.mark.slow)
    yield pytest.param("bert", "dp=8", marks=pytest.mark.slow)


@pytest.mark.parametrize("name, mesh", cases())
def test_a_narrower_reduction_is_never_dearer(name, mesh):
    wide, narrow = planned(name, mesh, "fp32"), planned(name, mesh, "bf16")
    assert all("optimal" in plan.status or plan.gap <= OPEN.get(name, 0.0) for plan in (wide, narrow))
    assert narrow.objective_s <= wide.objective_s * (1 + 1e-9)


def test_every_gradient_of_llama_is_reduced_in_the_dtype_asked_for():
    """Weights of RMSNorm have gradients made in float32."""
    for reduce, dtype in (("bf16", "bfloat16"), ("fp32", "float32")):
        plan = planned("llama", "dp=8", reduce)
        sums = [c for c in plan.collectives if c.hideable and c.phase == "backward" and c.kind in ("all_reduce", "reduce_scatter")]
        assert len(sums) >= len(plan.placements), "the batch is split, so every gradient is a sum"
        assert {c.dtype for c in sums} == {dtype}


@pytest.mark.parametrize("name", [*FAST, *SLOW, "bert"])
@pytest.mark.parametrize("reduce", ["bf16", "fp32"])
def test_every_gradient_may_be_summed_somewhere(name, reduce):
    """On every way from where a gradient is made to its output some value may move: in the dtype asked for, or, where
    the gradient never is in it (batch norm), anywhere."""
    graph = program(name, reduce, batch=8).graph
    wanted, of_parts = reduction_dtypes(graph), casts_of_parts(graph)
    for op in graph.outputs(Role.GRADIENT).values():
        ref, way = op.refs[0], []
        while ref in wanted:
            way.append(ref)
            maker = graph.op(ref.op)
            ref = maker.refs[0] if maker.refs else Ref("")
        assert not way or any(graph.meta(r).dtype == wanted[r] for r in way), op.target
    for name in of_parts:
        op = graph.op(name)
        assert op.outputs[0].dtype == Precision(reduce=reduce).reduction


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x)))


def test_a_reduction_in_neither_dtype_casts_gradients_there_and_back():
    graph = trace(Plain(), (torch.randn(4, 8), torch.randn(4, 8)), loss_fn=nn.functional.mse_loss, training=True,
                  precision=Precision(param=None, reduce="bf16")).graph
    gradients = graph.outputs(Role.GRADIENT)
    assert set(gradients) == {op.target for op in graph.of_kind("param")}
    for op in gradients.values():
        back = graph.op(op.refs[0].op)
        assert "_to_copy" in str(back.target) and graph.meta(op.refs[0]).dtype == torch.float32
        assert graph.meta(back.refs[0]).dtype == torch.bfloat16
