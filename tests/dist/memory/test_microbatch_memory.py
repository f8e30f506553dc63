"""What a step with micro-batches holds on real processes, as its timeline says, and less than the batch at once."""
from __future__ import annotations

import pytest
import torch

import autoshard
from autoshard import Pipeline
from models import llama
from tests.dist.harness import assert_same_training, on_ranks, twins
from tests.dist.live_bytes import step_peak

pytestmark = pytest.mark.dist
MESH, SEEDS = "d=2", {"layers.*.attention.w*.weight": ("d", None), "output.weight": ("d", None)}


def build():
    return llama.build(batch=16, seq=32, layers=2)


def planned(count: int) -> autoshard.Plan:
    model, _, batch = twins(build, torch.float64)
    return autoshard.plan(model, MESH, batch, loss_fn=llama.loss, cluster="h100-dgx", time_limit=30, seeds=SEEDS, pipeline=Pipeline(count))


def measure(count: int) -> tuple[float, float]:
    """(the timeline's peak, the measured one)"""
    from torch.distributed.device_mesh import init_device_mesh

    model, reference, batch = twins(build, torch.float64)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("d",))
    compiled = autoshard.compile(model, mesh, batch, loss_fn=llama.loss, training=True, plan=planned(count), cluster="h100-dgx", cache=False,
                                 pipeline=Pipeline(count))
    assert_same_training(compiled, reference, [batch] * 2, lambda m, b: m(*b), lambda m, b: llama.loss(m(*b[:-1]), b[-1]))
    return float(compiled.plan.memory["total"]), float(step_peak(compiled, batch))


def test_the_peak_is_as_predicted() -> None:
    whole, parts = planned(1), planned(4)
    assert parts.memory["saved"] < whole.memory["saved"] and parts.memory["total"] < whole.memory["total"]
    for predicted, measured in on_ranks(2, measure, 4):
        assert measured == pytest.approx(predicted, rel=1e-3)
