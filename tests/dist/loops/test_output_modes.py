"""A mode for every output, and DTensors of outputs whose leading dims a view has merged, on two processes."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.errors import UsageError
from tests.dist.harness import assert_near, on_ranks

pytestmark = pytest.mark.dist
SLOW = str(Path(__file__).parents[1] / "slow-device.toml")


class Words(nn.Module):
    """Returns a loss and logits, as models of transformers do; or logits alone, of all tokens in one dim."""

    def __init__(self, alone: bool = False, words: int = 24):
        super().__init__()
        self.words, self.head, self.alone = nn.Embedding(words, 16), nn.Linear(16, words), alone

    def forward(self, ids, labels):
        logits = self.head(torch.tanh(self.words(ids)).flatten(0, 1))
        return logits if self.alone else {"loss": F.cross_entropy(logits, labels.flatten()), "logits": logits}


def build(alone: bool = False, words: int = 24, tokens: int = 12):
    torch.manual_seed(0)
    ids, labels = torch.randint(words, (2, 2, tokens // 2))
    return Words(alone, words).double(), (ids, labels)


def beside_a_loss() -> None:
    small, large = {}, {"words": 1024, "tokens": 2048}
    for sizes, outputs, split in ((small, "replicate", False), (small, "auto", False), (large, "auto", True), (small, ("replicate", "dtensor"), True)):
        (model, batch), (reference, _) = build(**sizes), build(**sizes)
        wanted = reference(*batch)
        more = {} if outputs == "auto" else {"outputs": outputs}  # the default
        fast = autoshard.compile(model, "tp=2", cluster="cpu-gloo", cache=False, seeds={"output:1": "-,tp"} if split else {}, **more)
        got = fast(*batch)
        assert not isinstance(got["loss"], DTensor) and isinstance(got["logits"], DTensor) == split, outputs
        assert_near(f"{outputs}: loss", got["loss"], wanted["loss"], 1e-9)
        assert_near(f"{outputs}: logits", got["logits"], wanted["logits"], 1e-9)
        if split:
            rows, words = wanted["logits"].shape
            assert got["logits"].to_local().shape == (rows, words // 2), "the head's shard stays one"
        assert any("stays split" in note for note in fast.plan.notes) == split
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


def written_into() -> None:
    """Results belong to the user, as a view that ends a model does: logits by a temperature, masked ones, beside another result."""
    writes = {"divided": lambda y: y.div_(2.0), "masked": lambda y: y[:, -1].fill_(0.0), "behind autograd": lambda y: y.detach().mul_(3.0)}
    for name, write in writes.items():
        for tokens in (12, 10):
            (model, (ids, _)), (reference, _) = build(tokens=tokens), build(tokens=tokens)
            fast = autoshard.compile(Beside(model), "dp=2", cluster="cpu-gloo", cache=False, outputs="replicate")
            for net in (fast, Beside(reference)):
                logits, given = net(ids)
                write(logits)
                write(given)
                (logits.square().sum() + given.sum()).backward()
            assert torch.equal(ids, build(tokens=tokens)[1][0]), f"{name}: the input is the user's too"
            grads = {n.removeprefix("net."): p.grad for n, p in fast.named_parameters()}
            for n, p in reference.named_parameters():
                assert_near(f"{name}, {tokens} tokens: gradient of {n}", grads[n], p.grad, 1e-9)


class Beside(nn.Module):
    """Logits as a view, and a view of a copy of what backward reads."""

    def __init__(self, net: Words):
        super().__init__()
        self.net = net

    def forward(self, ids):
        hidden = torch.tanh(self.net.words(ids))
        return self.net.head(hidden), hidden.clone().transpose(0, 1)


def work() -> None:
    written_into()
    beside_a_loss()
    merged_dims()


def test_every_output_as_asked():
    on_ranks(2, work)


def test_what_is_gathered_beside_a_loss_is_named_with_its_price():
    model, batch = build(words=1024, tokens=2048)
    plans = {mode: autoshard.plan(model, "tp=2", batch, outputs=mode, cluster=SLOW) for mode in ("replicate", "auto")}
    (whole,) = (note for note in plans["replicate"].notes if note.startswith("output:1"))
    assert "is whole on every rank at every step (to gather it takes" in whole and "outputs='auto'" in whole
    assert any("output:1 (2048 x 1024) stays split" in note for note in plans["auto"].notes)
    assert plans["auto"].objective_s < plans["replicate"].objective_s
    model, batch = build()
    small = autoshard.plan(model, "tp=2", batch, cluster="cpu-gloo")
    assert not any(note.startswith("output:") for note in small.notes), "nothing is said of what costs nothing"


def test_a_mode_that_there_is_none_of_is_named():
    with pytest.raises(UsageError, match="'whole' is not one of auto, replicate, dtensor, local"):
        autoshard.plan(build()[0], "tp=2", build()[1], outputs="replicate,whole")
