"""Micro-batches in bf16: sums over many of them stop growing in eight bits, and the part that each is of the batch is rounded."""
from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from pipeline_ranks import on_threads, ranks_of
from torch import nn
from torch.nn import functional as F

import autoshard
from autoshard import Pipeline, Precision

ROUNDING = 2.0**-8
"""Of one number in bf16, relative."""
BATCH = 64


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.words(x)))


def told(out: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    """A mean by weights, a mean and a sum, beside outputs of every sample; "rows" counts."""
    return {"loss": F.cross_entropy(out.flatten(0, 1), target.flatten()), "mean": out.square().mean(), "total": out.square().sum(),
            "rows": (target >= 0).sum(), "out": out}


def of_the_mean(out: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    found = told(out, target)
    return {**found, "loss": found["mean"], "entropy": found["loss"]}


def of_the_sum(out: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    found = told(out, target)
    return {**found, "loss": found["total"], "entropy": found["loss"]}


def words(ignored: float, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randint(50, (BATCH, 11), generator=g), torch.randint(50, (BATCH, 11), generator=g)
    return x, torch.where(torch.rand(y.shape, generator=g) < ignored, -100, y)


def compiled_as(model: nn.Module, loss_fn: Callable, microbatches: int) -> nn.Module:
    return autoshard.compile(copy.deepcopy(model), "d=1", loss_fn=loss_fn, cluster="cpu-gloo", cache=False, precision=Precision("bf16"),
                             pipeline=Pipeline(microbatches))


def scale_of(found: nn.Module, wanted: nn.Module) -> float:
    """What number times the wanted gradients those found are."""
    got, want = (torch.cat([p.grad.flatten() for p in m.parameters()]).double() for m in (found, wanted))
    return float(got @ want / (want @ want))


@pytest.mark.parametrize("ignored", [0.0, 0.6])
@pytest.mark.parametrize("loss_fn", [told, of_the_mean, of_the_sum])
def test_many_micro_batches_are_the_batch(loss_fn: Callable, ignored: float) -> None:
    """A loss was off by 5 %, its gradients by 4 %."""
    torch.manual_seed(0)
    whole, batch = Words(), words(ignored)
    compiled = compiled_as(whole, loss_fn, BATCH)
    got, want = compiled(*batch), loss_fn(whole(batch[0]), batch[1])
    got["loss"].backward()
    want["loss"].backward()
    assert got["rows"] == want["rows"], "numbers that are integers are exact"
    for name in sorted(want.keys() - {"out", "rows"}):
        assert got[name].dtype == torch.bfloat16 and abs(got[name].item() / want[name].item() - 1) < ROUNDING, name
    assert got["out"].shape == want["out"].shape
    assert abs(scale_of(compiled, whole) - 1) < ROUNDING


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@pytest.mark.parametrize("count", [3, 6, 7, 24])
@pytest.mark.parametrize("loss_fn", [lambda out, target: out.mean(), lambda out, target: F.nll_loss(-out, target)], ids=["mean", "counted"])
def test_the_part_that_a_micro_batch_is_has_no_rounding(loss_fn: Callable, count: int) -> None:
    """Numbers of which bf16 holds all that a micro-batch computes: loss and gradient are exact, where a third in bf16 is 0.334."""
    targets = torch.zeros(4 * count, dtype=torch.int64)
    targets[::5] = -100
    compiled = compiled_as(Scaled(), loss_fn, count)
    loss = compiled(torch.ones(4 * count, 1), targets)
    loss.backward()
    assert loss.item() == 1.0 and abs(compiled.scale.grad.item() - 1) < 1e-6


@pytest.mark.parametrize("microbatches", [3, 16])
def test_ranks_of_a_pipeline_agree(microbatches: int) -> None:
    """Also on what gradients are multiplied by, where only the last stage sees weights, and where those of a metric do not concern the loss: the
    other rank waited for a number that nobody sent."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).bfloat16()
    x, targets = torch.randn(96, 6).bfloat16(), torch.randint(5, (96,))
    targets[torch.rand(96) < 0.5] = -100

    for loss_fn in (lambda out, y: {"loss": F.cross_entropy(out, y), "mean": out.square().mean()},
                    lambda out, y: {"loss": (out - 1).square().mean(), "entropy": F.cross_entropy(out, y)}):
        _, steps = ranks_of(whole, (x, targets), "pp=2", Pipeline(microbatches, cuts=["2"]), loss_fn)
        found = on_threads(steps, lambda step: step.run((x, targets), [None, None], 1, None))
        reference = copy.deepcopy(whole).float()
        want = loss_fn(reference(x.float()), targets)
        for outs in found:
            for got, (name, value) in zip(outs, want.items(), strict=True):
                assert abs(got.item() / value.item() - 1) < 2 * ROUNDING, name
        want["loss"].backward()
        losses = {id(step): outs[0] for step, outs in zip(steps, found, strict=True)}
        on_threads(steps, lambda step, losses=losses: losses[id(step)].backward())
        for name, p in reference.named_parameters():
            (g,) = (step.stored.params[name].grad for step in steps if name in step.stored.params)
            assert abs(float(g.double().flatten() @ p.grad.double().flatten() / p.grad.double().square().sum()) - 1) < 8 * ROUNDING, name
