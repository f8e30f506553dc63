"""Optimizer state and update workspace against torch's optimizers as they run."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from autoshard.cost.memory import scalar_bytes, state_bytes, update_workspace

sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))
from live_bytes import LiveBytes  # noqa: E402

SHAPES = ((96, 128), (8, 64, 32), (128,), (64, 64))
OPTIMIZERS = {
    "sgd": torch.optim.SGD, "momentum": lambda p, **k: torch.optim.SGD(p, momentum=0.9, **k), "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW, "nadam": torch.optim.NAdam, "radam": torch.optim.RAdam, "adamax": torch.optim.Adamax,
    "rmsprop": torch.optim.RMSprop, "adagrad": torch.optim.Adagrad, "adafactor": torch.optim.Adafactor}


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bytes_of_torch_optimizers(name: str, dtype: torch.dtype, together: bool) -> None:
    params = [nn.Parameter(torch.randn(s, dtype=dtype)) for s in SHAPES]
    optimizer = OPTIMIZERS[name](params, lr=1e-3, foreach=together)
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
