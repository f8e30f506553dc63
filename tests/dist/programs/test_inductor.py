"""backend="inductor" on two processes: the numbers of the eager backend, random ops included."""
from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import autoshard
from models import gpt, mlp
from tests.dist.harness import assert_near, on_ranks

pytestmark = pytest.mark.dist
SLOW = str(Path(__file__).parents[1] / "slow-device.toml")


def same_as_eager(module, **options) -> None:
    torch.manual_seed(0)
    model, batch = module.build(**options)
    eager, compiled = (autoshard.compile(copy.deepcopy(model), "d=2", batch, loss_fn=module.loss, cluster=SLOW, cache=False,
                                         backend=backend) for backend in ("eager", "inductor"))
    assert eager.plan == compiled.plan and eager.plan.collectives, "both split the model"
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, compiled)]
    for step in range(2):
        want, got = eager(*batch), compiled(*batch)
        assert_near(f"loss of step {step}", got, want, 1e-5)
        want.backward()
        got.backward()
        whole = {n: p.grad.full_tensor() for n, p in eager.named_parameters()}
        for name, p in compiled.named_parameters():
            assert_near(f"gradient of {name} in step {step}", p.grad, whole[name], 1e-4, 1e3)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def dropout_and_plain() -> None:
    same_as_eager(gpt, layers=1, dropout=0.2)
    same_as_eager(mlp)


@pytest.mark.slow
def test_inductor_draws_and_computes_as_eager() -> None:
    on_ranks(2, dropout_and_plain, timeout=900)
