"""Wrappers of torch around a compiled model, or around a call of it, end with a sentence, and leave it as it was."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.errors import UsageError
from tests.dist.harness import on_ranks

pytestmark = pytest.mark.dist


def refused(wrap: Callable[[], object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        wrap()


def wrapped() -> tuple[float, float]:
    from torch.distributed._composable import replicate
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    torch.manual_seed(0)
    original = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    model = autoshard.compile(original, "d=2", cluster="cpu-gloo", cache=False)
    x = torch.randn(8, 8)
    for _ in range(2):  # before there is a plan, and with one
        refused(lambda: DistributedDataParallel(model), "DistributedDataParallel.*train the compiled model itself")
        for part in (model, model.get_submodule("0"), list(model.children())):
            refused(lambda part=part: fully_shard(part), r"fully_shard\(\) on a compiled model.*memory_budget")
        refused(lambda: replicate(model), r"replicate\w*\(\) on a compiled model")
        loss = model(x).square().mean()
        loss.backward()
    drops = autoshard.compile(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), "d=2", cluster="cpu-gloo", cache=False)
    for reentrant in (False, True):  # gradients were of another dropout than the result
        refused(lambda again=reentrant: checkpoint(drops, x.requires_grad_(), use_reentrant=again), "draws random numbers.*torch.utils.checkpoint")
    checkpoint(drops.eval(), x, use_reentrant=False).sum().backward()
    assert drops.get_submodule("0").bias.grad.full_tensor().eq(8).all()
    return loss.item(), original(x).square().mean().item()


def test_wrappers_are_refused_with_a_sentence():
    for got, want in on_ranks(2, wrapped):
        assert got == pytest.approx(want, rel=1e-5)
