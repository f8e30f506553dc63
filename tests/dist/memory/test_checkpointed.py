"""`torch.utils.checkpoint` in a model, on two ranks: what it names is recomputed, the memory is what the plan says, and less."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoshard
from tests.dist.harness import assert_same_training, on_ranks, twins
from tests.dist.live_bytes import LiveBytes

BLOCKS, WIDTH, ROWS = 4, 64, 1024


class Blocks(nn.Module):
    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again = again
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.again else block(x))
        return x


def build(again: bool) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Blocks(again), (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))


def planned(again: bool) -> autoshard.Plan:
    model, _, batch = twins(lambda: build(again), torch.float64)
    return autoshard.plan(model, "d=2", batch, loss_fn=nn.functional.mse_loss, cluster="cpu-gloo", seeds={"input:*": ("d", None)})


def train(again: bool, plan: autoshard.Plan) -> tuple[int, int]:
    """Peak bytes of a step, and how often GELU ran in it."""
    from torch.distributed.device_mesh import init_device_mesh

    model, reference, batch = twins(lambda: build(again), torch.float64)
    loss = nn.functional.mse_loss
    compiled = autoshard.compile(model, init_device_mesh("cpu", (2,), mesh_dim_names=("d",)), batch, loss_fn=loss, training=True,
                                 plan=plan, cluster="cpu-gloo", cache=False)
    assert_same_training(compiled, reference, [batch] * 2, lambda m, b: m(*b), lambda m, b: loss(m(b[0]), b[1]))
    optimizer, ran = torch.optim.AdamW(compiled.parameters(), lr=0.0), []
    compiled(*batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    with LiveBytes(watch=lambda op, live: ran.append(op)) as seen:
        seen.track(list(compiled.parameters()), [list(s.values()) for s in optimizer.state.values()], batch)
        compiled(*batch).backward()
        optimizer.step()
    return seen.peak, ran.count(torch.ops.aten.gelu.default)


@pytest.mark.dist
def test_what_the_user_checkpoints_is_run_again() -> None:
    plain, lean = planned(False), planned(True)
    assert not lean.recompute, "the model says it, not the plan"
    assert lean.memory["total"] < 0.75 * plain.memory["total"]
    for again, plan in ((False, plain), (True, lean)):
        for peak, ran in on_ranks(2, train, again, plan):
            assert ran == BLOCKS * (1 + again)
            assert 0.9 * plan.memory["total"] <= peak <= plan.memory["total"]  # small gradients are reduced later than planned
