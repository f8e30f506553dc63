"""Dims that do not divide, on two and four processes: computed with a pad, stored as DTensor's chunks, and no user sees more than the true shape."""
from __future__ import annotations

import copy

import pytest
import torch
from uneven_models import HIDDEN, SPLIT, VOCAB, build

import autoshard
from tests.dist.harness import assert_near, assert_same_training, on_ranks, twins
from tests.dist.stored_forms import StoredForm

pytestmark = pytest.mark.dist
COLUMNS = {"words.weight": (None, "tp"), "up.weight": (None, "tp"), "down.weight": ("tp", None)}
"""The same weights split along their other dims."""


def compiled(model, seeds, mesh="tp=2", **options):
    return autoshard.compile(model, mesh, cluster="cpu-gloo", cache=False, seeds=seeds, **options)


def loss_of(model, batch):
    return model(*batch)["loss"]


def chunk(whole: torch.Tensor, dim: int, fast) -> torch.Tensor:
    """What torch.chunk gives this rank along the last axis, which may be nothing."""
    size, place = fast.place.mesh.sizes[-1], fast.place.coordinates[-1]
    pieces = whole.chunk(size, dim)
    return pieces[place] if place < len(pieces) else whole.narrow(dim, 0, 0)


def trains_alike(mesh: str, tied: bool, backend: str = "eager") -> None:
    model, reference, batch = twins(lambda: build(tied), torch.float64)
    original = {n: p.detach().clone() for n, p in model.named_parameters()}
    fast = compiled(model, SPLIT, mesh, backend=backend)
    logits = fast(*batch)["logits"]
    assert_near("logits", logits, reference(*batch)["logits"], 1e-9)
    for name, dim in (("words.weight", 0), ("up.weight", 0), ("up.bias", 0), ("down.weight", 1)):
        p = fast.get_parameter(name)
        assert p.shape == original[name].shape and torch.equal(p.full_tensor(), original[name])
        assert torch.equal(p.to_local(), chunk(original[name], dim, fast)), f"{name} lies as DTensor's chunks"
    assert any(f"{VOCAB} computed as" in note for note in fast.plan.notes), fast.plan.notes
    assert_same_training(fast, reference, [batch] * 3, loss_of)
    for name in ("words.weight", "up.weight", "down.weight"):
        held, piece = fast._stored.local(name), fast.get_parameter(name).to_local()
        assert held.numel() > piece.numel() or fast.place.coordinates[-1] < fast.place.mesh.sizes[-1] - 1, f"{name} has a pad on the last rank"
        assert_near(f"{name} behind its pad", held.norm(), piece.norm(), 1e-15)


def in_both_forms(mesh: str) -> None:
    for tied in (True, False):
        trains_alike(mesh, tied)


FORM = StoredForm(build, compiled, loss_of, loss_of)


def other_ways_in(folder: str) -> None:
    """A model on the meta device from a checkpoint, whole tensors, evaluation, a copy, `replan`, updates of pieces, and `no_sync`."""
    fast, reference, batch = FORM.from_checkpoint(folder, SPLIT)
    with torch.no_grad():
        for p in reference.parameters():
            p.mul_(1.5)
        fast.load_state_dict(reference.state_dict())
        assert_near("logits of evaluation", fast(*batch)["logits"], reference(*batch)["logits"], 1e-9)
    twin = copy.deepcopy(fast)
    assert_near("loss of a copy", loss_of(twin, batch), loss_of(reference, batch), 1e-9)
    one, two = autoshard.local_update(torch.optim.AdamW(fast.parameters(), lr=1e-2, eps=1e-5)), torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-5)
    with fast.no_sync():
        loss_of(fast, batch).backward()
    loss_of(reference, batch).backward()
    FORM.assert_same_step(fast, reference, batch, one, two)
    with torch.enable_grad():
        loss_of(fast, batch)  # the variant to plan anew
    fast.replan(one)
    FORM.assert_same_step(fast, reference, batch, one, two)


def test_training_is_that_of_one_process():
    on_ranks(2, in_both_forms, "tp=2")


def test_training_on_four_ranks():
    on_ranks(4, trains_alike, "dp=2,tp=2", True)


def test_norms_see_no_pad():
    on_ranks(2, FORM.clips_alike, SPLIT)


def test_checkpoints_go_on_elsewhere(tmp_path):
    on_ranks(4, FORM.goes_on, str(tmp_path), 0, SPLIT, "tp=4")
    on_ranks(2, FORM.goes_on, str(tmp_path), 1, SPLIT, "tp=2")
    on_ranks(2, FORM.goes_on, str(tmp_path), 2, COLUMNS, "tp=2")


def test_other_ways_in(tmp_path):
    on_ranks(2, other_ways_in, str(tmp_path / "whole"))


@pytest.mark.slow
def test_four_pieces_and_inductor():
    on_ranks(4, in_both_forms, "tp=4")
    on_ranks(2, trains_alike, "tp=2", True, "inductor")


assert HIDDEN % 2 and VOCAB % 2, "the sizes are what this file is about"
