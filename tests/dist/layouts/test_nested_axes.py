"""Weights that tp splits first and dp inside of that, on four processes: seen by users, optimizers and checkpoints in the model's order."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard._torch import StridedShard
from autoshard.base.spec import format_spec
from tests.dist.harness import assert_near, assert_same_training, on_ranks, twins
from tests.dist.stored_forms import StoredForm

pytestmark = pytest.mark.dist
MESH = "dp=2,tp=2"
NESTED = {"words.weight": "tp*dp,-", "up.weight": "tp*dp,-", "up.bias": "tp*dp", "down.weight": "-,tp*dp", "fused.weight": "tp*dp,-"}
PLAIN = {"words.weight": "-,tp", "up.weight": "tp,-", "up.bias": "-", "down.weight": "-,tp", "fused.weight": "tp,-"}


class Small(nn.Module):
    """An embedding, a product with a bias and one without, and a fused one with two parts in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(24, 16), nn.Linear(16, 32), nn.Linear(32, 16, bias=False)
        self.fused = nn.Linear(16, 32, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        x = x + self.down(F.gelu(self.up(x)))
        gate, value = self.fused(x).chunk(2, dim=-1)
        return F.silu(gate) * value


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target)


def build() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(3)
    return Small(), (torch.randint(24, (8, 4)), torch.randn(8, 4, 16, dtype=torch.float64))


def compiled(model: nn.Module, seeds: dict, mesh: str = MESH, **options) -> nn.Module:
    return autoshard.compile(model, mesh, loss_fn=loss, cluster="cpu-gloo", cache=False, seeds=seeds, **options)


def loss_of(model, batch):
    return model(*batch)


def alone(model, batch):
    return loss(model(batch[0]), batch[1])


FORM = StoredForm(build, compiled, loss_of, alone)


def trains_alike() -> None:
    """Users see the model's order; a rank has, of tp's piece, dp's share."""
    model, reference, batch = twins(build, torch.float64)
    original = {n: p.detach().clone() for n, p in model.named_parameters()}
    fast = compiled(model, {**NESTED, "input:0": "dp,-"})
    fast.prepare(*batch)
    dp, tp = fast.place.coordinates
    assert {n: format_spec(s) for n, s in fast.plan.placements.items()} == {
        "words.weight": "I0,S0", "up.weight": "I0,S0", "up.bias": "I0,S0", "down.weight": "I1,S1", "fused.weight": "I1,S1"}
    for name, dim in (("words.weight", 0), ("up.weight", 0), ("up.bias", 0), ("down.weight", 1)):
        p = fast.get_parameter(name)
        assert torch.equal(p.to_local(), original[name].chunk(2, dim)[tp].chunk(2, dim)[dp]), name
        assert p.placements[0] == StridedShard(dim, split_factor=2)
    shares = [part.chunk(2)[tp].chunk(2)[dp] for part in original["fused.weight"].chunk(2)]
    assert torch.equal(fast.get_parameter("fused.weight").to_local(), torch.cat(shares)), "the share of each part"
    for name, whole in original.items():
        assert torch.equal(fast.get_parameter(name).full_tensor(), whole), name
    assert_same_training(fast, reference, [batch] * 3, loss_of, alone)


def goes_on(folder: str) -> None:
    """A training that goes through checkpoints: nested, in mesh order on the same ranks, on one axis, on a mesh turned around, nested again."""
    turned = {name: text.replace("tp*dp", "dp*tp") for name, text in NESTED.items()}
    for at, (seeds, mesh) in enumerate(((NESTED, MESH), (PLAIN, MESH), (PLAIN, "tp=4"), (turned, "tp=2,dp=2"), (NESTED, MESH))):
        FORM.goes_on(folder, at, seeds, mesh)


def evaluates_under_a_policy() -> None:
    """The program for evaluation reads masters where training stored them, through their casts."""
    model, reference, batch = twins(build, torch.float64)
    fast = compiled(model, NESTED, precision=autoshard.Precision("fp32", "fp64", "fp64"))
    optimizer = torch.optim.AdamW(fast.parameters(), lr=1e-2)
    loss_of(fast, batch).backward()
    optimizer.step()
    trained = {n: p.full_tensor() for n, p in fast.named_parameters()}
    fast.eval()
    reference.load_state_dict(trained)
    with torch.no_grad():
        assert_near("loss of evaluation", loss_of(fast, batch), alone(reference, batch), 1e-6)


def whole_tensors_are_cut(folder: str) -> None:
    FORM.from_checkpoint(folder, NESTED)


def takes_whole_state() -> None:
    for seeds in (NESTED, {name: text.replace("tp*dp", "dp*tp") for name, text in NESTED.items()}):
        FORM.takes_whole_state(seeds, MESH)


def test_whole_state_is_cut_axis_by_axis():
    """torch put together wrong what two axes had cut of one dim of parts."""
    on_ranks(4, takes_whole_state)


def test_training_is_that_of_one_process():
    on_ranks(4, trains_alike)


def test_checkpoints_go_on_under_other_plans(tmp_path):
    on_ranks(4, goes_on, str(tmp_path))


def test_evaluation_reads_what_training_stored():
    on_ranks(4, evaluates_under_a_policy)


@pytest.mark.slow
def test_norms_and_whole_checkpoints(tmp_path):
    on_ranks(4, FORM.clips_alike, NESTED)
    on_ranks(4, whole_tensors_are_cut, str(tmp_path / "whole"))
