"""A mode for every output, and DTensors of outputs whose leading dims a view has merged, on two processes."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness import assert_near, on_ranks
from torch import nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.errors import UsageError

pytestmark = pytest.mark.dist


class Words(nn.Module):
    """Returns a loss and logits, as models of transformers do; or logits alone, of all tokens in one dim."""

    def __init__(self, alone: bool = False):
        super().__init__()
        self.words, self.head, self.alone = nn.Embedding(24, 16), nn.Linear(16, 24), alone

    def forward(self, ids, labels):
        logits = self.head(torch.tanh(self.words(ids)).flatten(0, 1))
        return logits if self.alone else {"loss": F.cross_entropy(logits, labels.flatten()), "logits": logits}


def build(alone: bool = False):
    torch.manual_seed(0)
    return Words(alone).double(), (torch.randint(24, (2, 6)), torch.randint(24, (2, 6)))


def beside_a_loss() -> None:
    (model, batch), (reference, _) = build(), build()
    wanted = reference(*batch)
    for outputs, split in (("replicate", False), ("auto", True), (("replicate", "dtensor"), True)):
        fast = autoshard.compile(model, "tp=2", outputs=outputs, cluster="cpu-gloo", cache=False, seeds={"output:1": "-,tp"} if split else {})
        got = fast(*batch)
        assert not isinstance(got["loss"], DTensor) and isinstance(got["logits"], DTensor) == split, outputs
        assert_near(f"{outputs}: loss", got["loss"], wanted["loss"], 1e-9)
        assert_near(f"{outputs}: logits", got["logits"], wanted["logits"], 1e-9)
        if split:
            assert got["logits"].to_local().shape == (12, 12), "the head's shard stays one"
        assert any("stays split" in note for note in fast.plan.notes) == (outputs == "auto")
        got["loss"].backward()
    with pytest.raises(UsageError, match="names 3 modes, and the model returns 2 tensors"):
        autoshard.compile(model, "tp=2", outputs="replicate,local,local", cluster="cpu-gloo", cache=False)(*batch)


def merged_dims() -> None:
    for seed in ("tp,-", "-,tp"):
        (model, batch), (reference, _) = build(True), build(True)
        fast = autoshard.compile(model, "tp=2", outputs="dtensor", cluster="cpu-gloo", cache=False, seeds={"output:0": seed})
        got, wanted = fast(*batch), reference(*batch)
        assert isinstance(got, DTensor) and got.shape == wanted.shape
        assert_near(f"{seed}: logits", got, wanted, 1e-9)
        (got.full_tensor() ** 2).sum().backward()
        (wanted ** 2).sum().backward()
        for name, p in fast.named_parameters():
            assert_near(f"{seed}: gradient of {name}", p.grad, reference.get_parameter(name).grad, 1e-9)


def work() -> None:
    beside_a_loss()
    merged_dims()


def test_every_output_as_asked():
    on_ranks(2, work)


def test_a_mode_that_there_is_none_of_is_named():
    with pytest.raises(UsageError, match="'whole' is not one of auto, replicate, dtensor, local"):
        autoshard.plan(build()[0], "tp=2", build()[1], outputs="replicate,whole")
