"""A budget that only offloading meets, on real processes: trains as one process does, within the budget, and goes on from
checkpoints under another plan."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import autoshard
from autoshard.base.mesh import parse_mesh
from autoshard.decide.options import Options
from autoshard.errors import UsageError
from autoshard.planner.one_stage import decide, prices
from autoshard.program.trace import trace
from models import gpt
from tests.dist.harness import assert_near, on_ranks, same_gradients, twins
from tests.dist.live_bytes import LiveBytes

MESH = "d=2"
STEPS, SAVED = 5, 2


def build() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return gpt.build(layers=2, width=128, heads=4, vocab=128, batch=2, seq=8)


def batch_of(step: int) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(step)
    return tuple(torch.randint(128, (2, 8), generator=g) for _ in range(2))


def plan(budget: float | None, offload: str) -> autoshard.Plan:
    """The first that fits: what is trained and measured holds for every one."""
    model, _, batch = twins(build, torch.float64)
    options = Options(cluster="h100-dgx", time_limit=120.0, memory_budget=budget, offload=offload)
    return decide(prices(trace(model, batch, loss_fn=gpt.loss), parse_mesh(MESH), options), options, has_loss=True, finer=False, enough=0.5)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5, foreach=True)  # as the profile says: all in one call


# --- on both ranks ---

def compiled(found: autoshard.Plan) -> tuple[nn.Module, nn.Module]:
    from torch.distributed.device_mesh import init_device_mesh

    model, reference, batch = twins(build, torch.float64)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("d",))
    return autoshard.compile(model, mesh, batch, loss_fn=gpt.loss, training=True, plan=found, cluster="h100-dgx", cache=False), reference


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    loss = model(*batch_of(step))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train(lean: autoshard.Plan, other: autoshard.Plan, folder: str) -> int:
    """The measured peak of the last step; the first ones are compared with one process."""
    model, reference = compiled(lean)
    optimizer, alone, losses = autoshard.local_update(adamw(model)), adamw(reference), []
    for step in range(STEPS):
        if step == SAVED:
            weights, state = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
        got, (x, target) = model(*batch_of(step)), batch_of(step)
        losses.append(gpt.loss(reference(x), target))
        assert_near(f"loss of step {step}", got, losses[-1], 1e-9)
        got.backward()
        losses[-1].backward()
        same_gradients(model, reference, 1e-9, step)
        for updates in (optimizer, alone):
            updates.step()
            updates.zero_grad()
    expected = dict(reference.named_parameters())
    for name, p in model.named_parameters():
        assert_near(f"weight {name}", p, expected[name], 1e-9)
    for plan_of_load in (other, lean):
        go_on(compiled(plan_of_load)[0], losses, folder)
    refused(lean)
    return measured(model, optimizer, lean)


def go_on(model: nn.Module, losses: list[torch.Tensor], folder: str) -> None:
    optimizer = autoshard.local_update(adamw(model))
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    for step in range(SAVED, STEPS):
        assert_near(f"loss of step {step}, from the checkpoint", train_step(model, optimizer, step), losses[step], 1e-9)


def refused(lean: autoshard.Plan) -> None:
    model, _ = compiled(lean)
    with pytest.raises(UsageError, match="local_update"):
        train_step(model, adamw(model), 0)


def measured(model: nn.Module, optimizer: torch.optim.Optimizer, found: autoshard.Plan) -> int:
    """The most bytes live in a step, without those that stand for the host's memory."""
    params = dict(model.named_parameters())
    state = {name: list(optimizer.state[p].values()) for name, p in params.items()}
    away = [t for name in found.offload for t in state[name] if t.ndim]
    batch = batch_of(STEPS)
    with LiveBytes() as seen:
        seen.ignore(away)
        seen.track(list(params.values()), list(model.buffers()), list(state.values()), batch)
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen.peak


@pytest.mark.dist
def test_offloading_plans_train_alike_within_the_budget(tmp_path: Path) -> None:
    free = plan(None, "none")
    lean = plan(0.4 * free.memory["total"], "optimizer")
    assert lean.offload, "split over two ranks, all state is more than the budget"
    for peak in on_ranks(2, train, lean, free, str(tmp_path)):
        assert 0.95 * lean.memory["total"] <= peak <= 1.001 * lean.memory["total"] <= 1.001 * lean.memory["limit"]
