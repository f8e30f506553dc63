"""`verify` trains with every optimizer of the table that says how."""
import pytest
import torch
from torch import nn

from autoshard.cost.optimizers import OPTIMIZERS, verified
from autoshard.errors import UsageError
from autoshard.verification.check import verify
from autoshard.verification.optimizers import optimizer_of


@pytest.mark.parametrize("name", verified())
def test_weights_after_steps_are_those_of_one_device(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 5))
    report = verify(model, "d=2", (torch.randn(4, 6), torch.randn(4, 5)), loss_fn=nn.functional.mse_loss, plans=("fully_sharded",),
                    steps=3, optimizer=name)
    assert report.ok and any(c.kind == "weight" for c in report.plans[0].checks), report
    assert type(optimizer_of(name)([nn.Parameter(torch.zeros(2))])).__name__ == OPTIMIZERS[name].torch


@pytest.mark.parametrize("name", ["adafactor", "adam8bit", "none", "lion"])
def test_others_are_refused_with_the_list(name: str) -> None:
    with pytest.raises(UsageError, match=f"optimizer='{name}' is none of adamw, adam, sgd, .*, nor a function"):
        optimizer_of(name)
