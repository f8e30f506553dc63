"""Micro-batches whose results are means by weights: the loss, or a metric beside it, and batches in which nothing counts."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoshard
from autoshard.errors import UsageError

LOSSES = {
    "metric": lambda o, y: {"loss": (o - 1).square().mean(), "ce": F.cross_entropy(o, y)},
    "accuracy": lambda o, y: {"loss": o.square().sum(), "right": ((o.argmax(1) == y) & (y >= 0)).sum() / (y >= 0).sum()},
    "several": lambda o, y: {"loss": sum([o.mean(), o.square().mean()]) + 2.5, "ce": F.cross_entropy(o, y) - 1},
    "loss": lambda o, y: {"loss": F.cross_entropy(o, y), "mean": o.square().mean()},
}


def compare(loss_fn, targets: torch.Tensor, microbatches: int) -> dict[str, torch.Tensor]:
    """Compares results and gradients with one call for the batch; gives the results."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double(), torch.randn(8, 6, dtype=torch.float64)
    fast = autoshard.compile(copy.deepcopy(model), "d=1", (x, targets), loss_fn=loss_fn, cluster="cpu-gloo", cache=False,
                             pipeline=autoshard.Pipeline(microbatches=microbatches))
    got, want = fast(x, targets), loss_fn(model(x), targets)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-12, atol=1e-12, equal_nan=True)
    got["loss"].backward()
    want["loss"].backward()
    for p, q in zip(fast.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)
    return want


@pytest.mark.parametrize("microbatches", [2, 4])
@pytest.mark.parametrize("which", LOSSES)
def test_weights_of_a_metric_leave_the_loss_alone(which: str, microbatches: int) -> None:
    """Its gradients were divided by the weights of the metric. The first micro-batch of four counts nothing."""
    targets = torch.tensor([-100, -100, 3, 0, -100, 1, 2, 4])
    assert compare(LOSSES[which], targets, microbatches)["loss"].isfinite()


def test_a_number_added_to_a_sum_is_refused() -> None:
    """Every micro-batch would add it; to a mean it may be added, and zero to a sum."""
    compare(lambda o, y: {"loss": sum([o.sum(), o.square().sum()])}, torch.zeros(8, dtype=torch.int64), 2)
    with pytest.raises(UsageError, match="not linear in a sum over samples"):
        compare(lambda o, y: {"loss": o.sum() + 2.5}, torch.zeros(8, dtype=torch.int64), 2)


@pytest.mark.parametrize("which", LOSSES)
def test_a_batch_in_which_no_target_counts_has_the_gradients_of_one_device(which: str) -> None:
    """They were nan, and all weights after the step."""
    compare(LOSSES[which], torch.full((8,), -100), 2)
