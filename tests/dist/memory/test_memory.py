"""Budgets on real processes: the run stays within them, and trains as one process does."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import autoshard
from autoshard.base.plan import GRADIENTS_IN_FLIGHT
from autoshard.program.trace import trace
from models import llama
from tests.dist.harness import assert_same_training, on_ranks, twins
from tests.dist.live_bytes import step_peak

MESH = "d=2"
SIZES = {"batch": 32, "seq": 32, "layers": 3}


def build():
    return llama.build(**SIZES)


def plan(budget: float | None) -> autoshard.Plan:
    model, _, batch = twins(build, torch.float64)
    return autoshard.plan(model, MESH, batch, loss_fn=llama.loss, cluster="h100-dgx", time_limit=20, memory_budget=budget)


def layers_again(found: autoshard.Plan) -> set[str]:
    """The layers of which backward recomputes some op."""
    model, _, batch = twins(build, torch.float64)
    graph = trace(model, batch, loss_fn=llama.loss).graph
    modules = [graph.op(name).module.split(".") for name in found.recompute]
    return {path[1] for path in modules if path[0] == "layers"}


def train_all(plans: list[autoshard.Plan]) -> list[float]:
    return [train(found) for found in plans]


def train(found: autoshard.Plan) -> float:
    """The measured peak."""
    from torch.distributed.device_mesh import init_device_mesh

    model, reference, batch = twins(build, torch.float64)
    compiled = autoshard.compile(model, init_device_mesh("cpu", (2,), mesh_dim_names=("d",)), batch, loss_fn=llama.loss,
                                 training=True, plan=found, cluster="h100-dgx", cache=False)
    assert_same_training(compiled, reference, [batch] * 2, lambda m, b: m(*b), lambda m, b: llama.loss(m(*b[:-1]), b[-1]))
    return float(step_peak(compiled, batch))


@pytest.mark.dist
def test_recomputing_plans_train_alike_within_the_budget():
    """What a plan recomputes depends on how far its search comes within its limit: on a slow machine `some` may recompute as much as `lean`."""
    free = plan(None)
    some = next(p for share in (0.5, 0.45) if (p := plan(share * free.memory["total"])).recompute)
    lean = next(p for share in (0.35, 0.32) if len(layers_again(p := plan(share * free.memory["total"]))) == SIZES["layers"])
    assert lean.memory["total"] <= lean.memory["limit"] < some.memory["limit"] < free.memory["total"]
    assert some.memory["total"] <= some.memory["limit"]
    soon = replace(lean, settings={**lean.settings, GRADIENTS_IN_FLIGHT: 1 << 12})
    for *peaks, waiting in on_ranks(2, train_all, [some, lean, soon]):
        assert waiting <= peaks[-1], "fewer gradients wait, and training is the same"
        for found, peak in zip([some, lean], peaks, strict=True):  # less than planned where an op overwrites what dies with it
            assert 0.8 * found.memory["total"] <= peak <= found.memory["total"] * (1 + 1e-9), (peak, found.memory)
