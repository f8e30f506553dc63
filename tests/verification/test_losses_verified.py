"""Losses that look at data, or that torch computes otherwise while it traces, and constants that a module run whole is given."""
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard.errors import CheckError, TraceError

LABELS = torch.tensor([[1, 2, -1, 3, 0, 0], [0, -1, -1, -1, -1, -1], [5, 4, 3, 2, 1, 0], [3, -1, 1, 2, -1, 0]])
WORDS = torch.tensor([[1, 2, 3], [5, 4, 3], [2, 2, 1], [4, 1, 5]])


class Net(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.loss, self.mean, self.other, self.ctc = loss, nn.Linear(12, 6), nn.Linear(12, 6), nn.CTCLoss()

    def forward(self, x):
        return self.loss(self, x, self.mean(x), self.other(x))


def multilabel(reduction):
    return lambda m, x, mean, other: F.multilabel_margin_loss(mean[:, 0], LABELS, reduction=reduction)


def gaussian(**options):
    return lambda m, x, mean, other: F.gaussian_nll_loss(mean, x[..., :6], other.square(), **options)


def one_variance(m, x, mean, other):
    return F.gaussian_nll_loss(mean, x[..., :6], other[..., 0].exp())


def connectionist(m, x, mean, other):
    """Its target is no input."""
    return m.ctc(mean.log_softmax(-1).transpose(0, 1), WORDS, torch.full((4,), 9), torch.tensor([3, 3, 2, 1]))


CASES = {**{f"multilabel {how}": multilabel(how) for how in ("mean", "sum", "none")}, "gaussian": gaussian(eps=0.5),
         "gaussian full": gaussian(full=True, reduction="none"), "gaussian, a variance per row": one_variance, "ctc": connectionist}


@pytest.mark.parametrize("case", CASES)
def test_same_numbers(case):
    torch.manual_seed(0)
    report = autoshard.verify(Net(CASES[case]), "d=2,t=2", (torch.randn(4, 9, 12),), plans=("split", "random:0"), fallback="replicate")
    assert report.ok, str(report)


def test_a_negative_variance_raises_when_the_program_runs():
    compiled = autoshard.compile(Net(lambda m, x, mean, other: F.gaussian_nll_loss(mean, x[..., :6], x[..., 6:])), "d=1", cluster="cpu-gloo", cache=False)
    compiled(torch.ones(4, 9, 12))
    with pytest.raises(CheckError, match=r"test_losses_verified.py:\d+.*var has negative"):
        compiled(-torch.ones(4, 9, 12))


def test_ctc_is_refused_with_what_to_do():
    def alone(m, x, mean, other):
        return F.ctc_loss(mean.log_softmax(-1).transpose(0, 1), WORDS, (9,) * 4, (3, 3, 2, 1))

    with pytest.raises(TraceError, match=r'(?s)ctc_loss.*compute the loss of what the compiled model returns.*fallback="replicate"'):
        autoshard.plan(Net(alone), "d=2", (torch.randn(4, 9, 12),), cluster="cpu-gloo")
