"""Budgets on real processes: the run stays within them, and trains as one process does."""
from __future__ import annotations

import pytest
import torch
from harness import assert_same_training, on_ranks, twins
from live_bytes import step_peak

import autoshard
from models import llama

MESH = "d=2"
SIZES = {"batch": 32, "seq": 32, "layers": 4}


def build():
    model, batch = llama.build(**SIZES)
    return model, batch


def plan(budget: float | None) -> autoshard.Plan:
    model, _, batch = twins(build, torch.float64)
    return autoshard.plan(model, MESH, batch, loss_fn=llama.loss, cluster="h100-dgx", time_limit=20, memory_budget=budget)


def train(found: autoshard.Plan) -> float:
    from torch.distributed.device_mesh import init_device_mesh

    model, reference, batch = twins(build, torch.float64)
    compiled = autoshard.compile(model, init_device_mesh("cpu", (2,), mesh_dim_names=("d",)), batch, loss_fn=llama.loss,
                                 training=True, plan=found, cluster="h100-dgx", cache=False)
    assert_same_training(compiled, reference, [batch] * 2, lambda m, b: m(*b), lambda m, b: llama.loss(m(*b[:-1]), b[-1]))
    return float(step_peak(compiled, batch))


@pytest.mark.dist
def test_recomputing_plans_train_alike_within_the_budget():
    free = plan(None)
    lean = next(p for share in (0.5, 0.4, 0.3, 0.2) if (p := plan(share * free.memory["total"])).recompute)
    assert lean.memory["total"] <= lean.memory["limit"] < free.memory["total"]
    for peak in on_ranks(2, train, lean):
        assert peak <= 1.001 * lean.memory["total"] and peak >= 0.9 * lean.memory["total"]
