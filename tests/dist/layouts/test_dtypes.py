"""Stored tensors of dtypes that gloo's collectives do not know, whole and in pieces, against one process."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import autoshard
from tests.dist.harness import on_ranks, whole

pytestmark = pytest.mark.dist
DTYPES = (torch.float8_e4m3fn, torch.int16, torch.uint16, torch.bool, torch.complex64)


class Quantized(nn.Module):
    """A layer, and a product by a frozen weight; a buffer, one without dims and an empty one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12).double()
        self.weight = nn.Parameter((torch.arange(192.0).view(16, 12) % 7).to(dtype), requires_grad=False)
        for name, value in (("offset", torch.ones(16)), ("scale", torch.tensor(2.0)), ("empty", torch.zeros(0))):
            self.register_buffer(name, value.to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, offset, scale = (t.abs().double() if t.is_complex() else t.double() for t in (self.weight, self.offset, self.scale))
        return self.layer(x) @ (weight * scale).T + offset + self.empty.double().sum().abs()


def trained(split: bool) -> int:
    x = torch.arange(96.0, dtype=torch.float64).view(8, 12).sin()
    for dtype in DTYPES:
        torch.manual_seed(0)
        model = Quantized(dtype)
        fast = autoshard.compile(copy.deepcopy(model), "d=2", cluster="cpu-gloo", cache=False, seeds={"weight": ("d", None)} if split else None)
        for m in (fast, model):
            m(x).sum().backward()
        assert torch.allclose(fast(x), model(x), rtol=1e-12), dtype
        assert torch.allclose(whole(fast.layer.weight.grad), model.layer.weight.grad, rtol=1e-12), dtype
    return len(DTYPES)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_dtypes_that_gloo_does_not_know(split: bool) -> None:
    assert on_ranks(2, trained, split) == [len(DTYPES)] * 2
