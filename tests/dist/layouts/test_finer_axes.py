"""Heads over a part of a mesh axis: six heads on four ranks, two heads of keys on four; the numbers of one process, DTensors of the user's mesh."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import autoshard
from autoshard.base.mesh import Mesh
from models import llama
from tests.dist.harness import assert_same_training, on_ranks, twins
from tests.dist.stored_forms import StoredForm

pytestmark = pytest.mark.dist
SLOW = str(Path(__file__).parents[1] / "slow-device.toml")
SIX = {"width": 24, "heads": 6, "kv_heads": 2}
FOUR = {"width": 32, "heads": 4, "kv_heads": 2}


def build(sizes: dict[str, int]) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """One row and nine positions: neither divides, so work is split by heads or not at all."""
    model, batch = llama.build(layers=1, vocab=64, hidden=48, batch=1, seq=9, **sizes)
    return model, batch


def compiled(model: nn.Module, seeds: dict, mesh: str = "tp=4", **options) -> nn.Module:
    return autoshard.compile(model, mesh, loss_fn=llama.loss, training=True, cluster=SLOW, cache=False, seeds=seeds,
                             **{"refine_axes": "auto" if "4" in mesh else "never", **options})


def loss_of(model, batch):
    return model(*batch)


def alone(model, batch):
    return llama.loss(model(*batch[:-1]), batch[-1])


SIX_HEADS = StoredForm(lambda: build(SIX), compiled, loss_of, alone)


def trains_alike(sizes: dict[str, int], mesh: str, asked: str, parts: tuple[int, ...]) -> None:
    model, reference, batch = twins(lambda: build(sizes), torch.float64)
    fast = compiled(model, {}, mesh, refine_axes=asked)
    fast.prepare(*batch)
    plan = fast.plan
    assert plan.finer == {"tp": parts} and isinstance(plan.mesh, Mesh) and str(plan.mesh) == mesh
    assert {c.axis for c in plan.collectives} & {"tp//2", "tp%2"}, "some value lies on a part of the axis"
    for name, p in fast.named_parameters():
        assert len(p.placements) == plan.mesh.ndim == len(plan.placements[name]) and p.device_mesh.mesh_dim_names == plan.mesh.names
    assert_same_training(fast, reference, [batch] * 3, loss_of, alone)
    fast.eval()
    with torch.no_grad():
        assert torch.allclose(fast(*batch), alone(reference, batch), rtol=1e-9)


def goes_on(folder: str) -> None:
    """A training that goes through checkpoints: with the axis in parts, as it is, on another mesh, in parts again."""
    for at, (mesh, more) in enumerate((("tp=4", {}), ("tp=4", {"refine_axes": "never"}), ("dp=2,tp=2", {}), ("tp=4", {}))):
        form = StoredForm(SIX_HEADS.build, lambda *a, more=more, **k: compiled(*a, **k, **more), loss_of, alone)
        form.goes_on(folder, at, {}, mesh)


def test_training_is_that_of_one_process():
    on_ranks(4, trains_alike, SIX, "tp=4", "auto", (2, 2))


def test_checkpoints_go_on_in_other_meshes(tmp_path):
    on_ranks(4, goes_on, str(tmp_path))


def clips_alike() -> None:
    SIX_HEADS.clips_alike({})


@pytest.mark.slow
def test_two_heads_of_keys_on_four_ranks_and_clipping():
    on_ranks(4, trains_alike, FOUR, "tp=4", "tp=2x2", (2, 2))
    on_ranks(4, clips_alike)
