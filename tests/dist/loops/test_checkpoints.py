"""Optimizer states in their ZeRO forms: five steps as on one process, and checkpoints that go on under other plans and meshes.

Weights, gradients and optimizer state are stored split in all three. ZeRO-1 keeps gradients whole until the end of a step (of two
micro-batches, the first under `no_sync`), ZeRO-2 reduces them at once, ZeRO-3 gathers weights again for backward."""
from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import autoshard
from autoshard.base.mesh import parse_mesh
from autoshard.base.plan import Plan
from autoshard.cost.memory import state_bytes
from models import gpt
from tests.dist.forced import fully_sharded, tensor_parallel
from tests.dist.harness import assert_near, on_ranks, twins, whole

OPTIMIZERS = {"sgd": lambda p: torch.optim.SGD(p, lr=0.1), "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
              "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-5)}
FORMS = ("zero 1", "zero 2", "zero 3")
STEPS, SAVED = 5, 2
BATCH, SEQ = 8, 16


def build() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return gpt.build(layers=1, width=32, heads=4, vocab=64, batch=BATCH, seq=SEQ)


def micro_batches(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(step)
    return [tuple(torch.randint(64, (BATCH, SEQ), generator=g) for _ in range(2)) for _ in range(2)]


def planned(mesh: str, seeds) -> Plan:
    model, _, batch = twins(build, torch.float64)
    on_rows = {m: (parse_mesh(mesh).names[0], ...) for m in ("h.0", "h.0.attn", "h.0.mlp")}  # activations stay on the batch, so it is weights that move
    return autoshard.plan(model, mesh, batch, loss_fn=gpt.loss, cluster="cpu-gloo",
                          seeds=seeds(model, [tuple(t.shape) for t in batch], parse_mesh(mesh)) | on_rows)


def gathering(plan: Plan, source: str) -> Plan:
    """The plan with everything that both windows gather kept for backward, or made again there."""
    forward = {(c.value, c.spec) for c in plan.copies if c.window == "forward"}
    again = [c for c in plan.copies if c.window == "backward" and (c.value, c.spec) in forward]
    assert len(again) >= 4, "backward hardly reads a gathered weight, so the forms are alike"
    return replace(plan, copies=tuple(replace(c, source=source) if c in again else c for c in plan.copies))


def forms(plan: Plan) -> dict[str, Plan]:
    return {"zero 1": gathering(plan, "kept"), "zero 2": gathering(plan, "kept"), "zero 3": gathering(plan, "made")}


def train_step(model: nn.Module, loss_of, optimizer: torch.optim.Optimizer, step: int, form: str = "") -> float:
    losses = []
    for i, batch in enumerate(micro_batches(step)):
        with model.no_sync() if form == "zero 1" and i == 0 else nullcontext():
            loss = loss_of(model, batch)
            (loss / 2).backward()
            losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    return sum(losses) / 2


def alone(optimizer: str) -> list[float]:
    """Losses of one process."""
    _, model, _ = twins(build, torch.float64)
    updates = OPTIMIZERS[optimizer](model.parameters())
    return [train_step(model, lambda m, b: gpt.loss(m(b[0]), b[1]), updates, step) for step in range(STEPS)]


# --- on every rank ---

def compiled(plan: Plan) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh

    model, _, batch = twins(build, torch.float64)
    mesh = init_device_mesh("cpu", plan.mesh.sizes, mesh_dim_names=plan.mesh.names)
    return autoshard.compile(model, mesh, batch, loss_fn=gpt.loss, training=True, plan=plan, cluster="cpu-gloo", cache=False)


def through(model: nn.Module, b: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return model(*b)


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def split_in_two(model: nn.Module, optimizer: torch.optim.Optimizer, name: str) -> None:
    """Half of every weight is here, and the optimizer's state is what the model of memory says."""
    assert all(2 * p.to_local().numel() == p.numel() for p in model.parameters())
    here = [t.to_local() for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t) and t.ndim]
    assert sum(t.untyped_storage().nbytes() for t in here) == sum(
        state_bytes(name, tuple(p.to_local().shape), p.dtype) for p in model.parameters())


def before(plans: dict[str, Plan], other: Plan, folder: str) -> dict[tuple[str, str, str], list[float]]:
    """Losses of all steps without interruption, saved on the way; and of the last steps on from there under `other`."""
    models = {plan.copies: compiled(plan) for plan in plans.values()}
    elsewhere, losses = compiled(other), {}
    start = {n: whole(p).clone() for n, p in elsewhere.state_dict().items()}
    for form, plan in plans.items():
        for name, make in OPTIMIZERS.items():
            model = models[plan.copies]
            model.load_state_dict(start)
            updates = make(model.parameters())
            losses[form, name, "through"] = []
            for step in range(STEPS):
                if step == SAVED:
                    split_in_two(model, updates, name)
                    save(model, updates, f"{folder}/{form} {name}")
                losses[form, name, "through"].append(train_step(model, through, updates, step, form))
            losses[form, name, "on"] = go_on(elsewhere, name, f"{folder}/{form} {name}")
    return losses


def go_on(model: nn.Module, name: str, folder: str) -> list[float]:
    updates = OPTIMIZERS[name](model.parameters())
    load(model, updates, folder)
    return [train_step(model, through, updates, step) for step in range(SAVED, STEPS)]


def after(plan: Plan, folder: str) -> dict[tuple[str, str, str], list[float]]:
    model = compiled(plan)
    return {(form, name, "on"): go_on(model, name, f"{folder}/{form} {name}") for form, name in zip(FORMS, OPTIMIZERS, strict=True)}


@pytest.mark.dist
def test_zero_forms_train_alike_and_go_on_from_checkpoints(tmp_path: Path) -> None:
    expected = {name: alone(name) for name in OPTIMIZERS}
    two, four = planned("d=2", fully_sharded), planned("dp=2,tp=2", tensor_parallel)
    found = on_ranks(2, before, forms(two), planned("d=2", tensor_parallel), str(tmp_path))
    found += on_ranks(4, after, four, str(tmp_path))
    for losses in found:
        for (form, name, part), got in losses.items():
            want = expected[name] if part == "through" else expected[name][SAVED:]
            assert_near(f"{form}, {name}, {part}", torch.tensor(got), torch.tensor(want), 1e-9)
