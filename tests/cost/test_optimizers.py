"""Optimizer state and update workspace against torch's optimizers as they run."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoshard.cost.memory import scalar_bytes, state_bytes, update_workspace
from autoshard.cost.optimizers import OPTIMIZERS, elementwise_classes, optimizer_name
from tests.dist.live_bytes import LiveBytes

SHAPES = ((96, 128), (8, 64, 32), (128,), (64, 64))
OF_TORCH = {name: row for name, row in OPTIMIZERS.items() if row.torch}


def made(name: str, params: list[nn.Parameter], **arguments: Any) -> torch.optim.Optimizer:
    row = OF_TORCH[name]
    return getattr(torch.optim, row.torch)(params, **{**(row.verified_with or {}), "lr": 1e-3, **arguments})


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OF_TORCH)
def test_bytes_of_torch_optimizers(name: str, dtype: torch.dtype, together: bool) -> None:
    params = [nn.Parameter(torch.randn(s, dtype=dtype)) for s in SHAPES]
    optimizer = made(name, params, foreach=together)
    for _ in range(8):  # RAdam adapts from the sixth step on
        for p in params:
            p.grad = torch.randn_like(p)
        state = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
        with LiveBytes() as seen:  # the last step counts
            seen.track(params, [p.grad for p in params], state)
            before = seen.live
            optimizer.step()
    assert sum(t.numel() * t.itemsize for t in state) == sum(state_bytes(name, s, dtype) for s in SHAPES) + scalar_bytes(name, len(SHAPES))
    sizes = [p.numel() * p.itemsize for p in params]
    few = 0.1 * max(sizes)  # row and column sums, scalars
    assert seen.peak - before == pytest.approx(update_workspace(name, sizes, together), abs=few)


def test_small_parameters_have_no_eight_bit_state() -> None:
    assert state_bytes("adamw8bit", (4095,), torch.bfloat16) == 2 * 4 * 4095
    assert state_bytes("adamw8bit", (64, 65), torch.bfloat16) == 2 * (64 * 65 + 4 * 17)


@pytest.mark.parametrize("name", OF_TORCH)
def test_a_name_a_class_and_an_object_are_one(name: str) -> None:
    given = made(name, [nn.Parameter(torch.randn(3, 4))])
    assert optimizer_name(given) == optimizer_name(name) == name
    assert optimizer_name(type(given)) == ("sgd" if OF_TORCH[name].setting else name), "a class has no settings"


def test_what_the_table_does_not_have_keeps_its_name() -> None:
    assert optimizer_name(None) == "none" and optimizer_name(torch.optim.Rprop) == "rprop"


@pytest.mark.parametrize("kind", elementwise_classes())
def test_pieces_are_updated_as_the_whole_is(kind: str) -> None:
    """What `elementwise` claims: a parameter cut in two is updated to the same numbers as in one."""
    torch.manual_seed(0)
    whole = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))
    halves = [nn.Parameter(h.clone()) for h in whole.detach().split(3)]
    optimizers = [getattr(torch.optim, kind)(params, lr=1e-2) for params in ([whole], halves)]
    for _ in range(8):
        whole.grad = torch.randn_like(whole)
        for half, grad in zip(halves, whole.grad.split(3), strict=True):
            half.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(whole, torch.cat(halves))
