"""Inputs of which every rank passes its piece lie as they come in: split over the batch axes, or as their seed says."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import UsageError


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (self.lin(x) * scale).square().mean()


def placed(scale: torch.Tensor, **options) -> dict:
    plan = autoshard.plan(Two(), "dp=2,tp=2", (torch.randn(8, 16), scale), inputs="local", cluster="cpu-gloo", **options)
    return {"x": plan.ops["input:0"].outputs[0], "scale": plan.ops["input:1"].outputs[0]}


def test_local_inputs_are_split_over_the_first_axis():
    assert placed(torch.randn(8, 16)) == {"x": (0, -1), "scale": (0, -1)}


def test_a_seed_says_how_one_input_comes_in_and_the_others_stay_split():
    assert placed(torch.randn(8, 16), seeds={"input:1": "-,-"}) == {"x": (0, -1), "scale": (-1, -1)}


def test_an_input_with_a_seed_need_not_divide():
    with pytest.raises(UsageError, match=r"input:1 of shape \(1, 16\) does not split along dim 0 over dp=2"):
        placed(torch.randn(1, 16))
    assert placed(torch.randn(1, 16), seeds={"input:1": "-,-"})["scale"] == (-1, -1)
