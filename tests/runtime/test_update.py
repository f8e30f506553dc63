"""Steps on local pieces; that they move DTensors as whole steps do is part of tests/dist/loops/test_training.py."""
from __future__ import annotations

import pytest
import torch

from autoshard import local_update
from autoshard.errors import UsageError


def weights() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(4))]


def test_refuses_an_update_of_whole_tensors() -> None:
    with pytest.raises(UsageError, match="Adafactor may look at more of a parameter than one element"):
        local_update(torch.optim.Adafactor(weights()))


def test_refuses_an_unknown_subclass() -> None:
    class Mine(torch.optim.SGD):
        pass

    with pytest.raises(UsageError, match="Mine"):
        local_update(Mine(weights(), lr=0.1))


@pytest.mark.parametrize("closure", [False, True])
def test_plain_tensors_and_closures_are_as_before(closure: bool) -> None:
    found = []
    for wrap in (local_update, lambda optimizer: optimizer):
        ws = weights()
        optimizer = wrap(torch.optim.AdamW(ws, lr=0.1))

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value = sum((w ** 2).sum() for w in ws)
            value.backward()
            return value

        for _ in range(3):
            optimizer.step(loss) if closure else (loss(), optimizer.step())
        found.append(torch.cat([w.detach().flatten() for w in ws]))
    assert torch.equal(*found)
