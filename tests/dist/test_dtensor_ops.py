"""What training loops compute with the DTensors of a compiled model: the numbers of plain tensors, where torch alone gives others."""
from __future__ import annotations

import copy
import math
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))

from harness import assert_near, on_ranks, whole  # noqa: E402

import autoshard  # noqa: E402
from autoshard.runtime.params import dtensor_ops  # noqa: E402

pytestmark = pytest.mark.dist
NUMBERS = {
    "sum": lambda p: p.detach().sum().item(), "mean": lambda p: float(p.detach().mean()), "norm": lambda p: p.norm().item(), "largest": lambda p: p.max().item(),
    "count": lambda p: int((p > 0).sum()), "branch": lambda p: 1.0 if (p > p.max() * 0.9).any() else 0.0,
    "finite": lambda p: float(torch.isfinite(p.log()).all()), "product": lambda p: (1 + p / 10).prod().item(),
    "norm of norms": lambda p: torch.stack([p.norm(), 2 * p.norm()]).norm().item(), "inf norm": lambda p: p.norm(math.inf).item(),
    "one column": lambda p: p[:, -1:].sum().item(),
}
LOSSES = {name: getattr(F, name) for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss")}
PENALTIES = {
    **{name: lambda p, loss=loss: loss(p, p.detach().sign() * 2) for name, loss in LOSSES.items()},
    **{f"{name}, summed": lambda p, loss=loss: loss(p, p.detach().sign() * 2, reduction="sum") for name, loss in LOSSES.items()},
    "binary_cross_entropy": lambda p: F.binary_cross_entropy(p.sigmoid(), p.detach().cos().square()),
    "with logits": lambda p: F.binary_cross_entropy_with_logits(p, p.detach().cos().square()),
    "square": lambda p: p.square().sum(), "norm": lambda p: p.norm(), "columns": lambda p: p.norm(dim=0).sum(), "rows": lambda p: p.norm(dim=1).sum(),
    "kept columns": lambda p: (p.norm(dim=0, keepdim=True) * 2).sum(), "l3 columns": lambda p: torch.linalg.vector_norm(p, 3, 0).sum(),
    "kept": lambda p: torch.linalg.vector_norm(p, 2, None, True).sum(),
    "masked": lambda p: (p * (p > 0.5).any(0)).sum(), "masked by rows": lambda p: (p * (p > 1).any(1, keepdim=True)).square().sum(),
    "masked by all": lambda p: p.sum() * (p > 1).any().double(),
}


def compare_weights(mesh: str, cases: list[tuple[tuple[int, int], str]]) -> None:
    """A weight of each shape, split as its seed says, in pieces that are equal or not."""
    for shape, seed in cases:
        torch.manual_seed(0)
        reference = nn.Linear(*reversed(shape), bias=False).double()
        with torch.no_grad():
            reference.weight.copy_(torch.randn(shape))
        compiled = autoshard.compile(copy.deepcopy(reference), mesh, (torch.zeros(2, shape[1]).double(),), seeds={"weight": seed},
                                     cluster="cpu-gloo", cache=False)
        assert not any(p.is_replicate() for p in compiled.weight.placements), f"{shape} {seed} is whole"
        for name, number in NUMBERS.items():
            assert number(compiled.weight) == pytest.approx(number(reference.weight), rel=1e-12), f"{name} of {shape} {seed}"
        for name, penalty in PENALTIES.items():
            got, want = (penalty(m.weight) for m in (compiled, reference))
            assert_near(f"{name} of {shape} {seed}", got, want, 1e-12)
            grads = (torch.autograd.grad(value, m.weight)[0] for value, m in ((got, compiled), (want, reference)))
            assert_near(f"gradient of {name} of {shape} {seed}", *grads, 1e-12)


def loops_of_users() -> None:
    """Two loops with numbers in Python: steps that are not finite are left out, gradients and weights are clipped by hand."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10)).double()
    x, t = torch.randn(32, 16).double(), torch.randint(10, (32,))
    compiled = autoshard.compile(copy.deepcopy(reference), "d=2", loss_fn=F.cross_entropy, seeds={"0.weight": "d,-", "0.bias": "d", "2.weight": "-,d"},
                                 cluster="cpu-gloo", cache=False)
    losses = [_trained(m, lambda m=m, f=f: f(m)) for m, f in ((compiled, lambda m: m(x, t)), (reference, lambda m: F.cross_entropy(m(x), t)))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    for (name, p), q in zip(compiled.named_parameters(), reference.parameters(), strict=True):
        assert_near(name, p, q, 1e-12)


def _trained(model: nn.Module, loss_of) -> list[float]:
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01)  # reads norms as numbers
    losses = []
    for step in range(4):
        loss = loss_of() + 0.01 * sum(p.square().sum() for p in model.parameters()) + sum(F.mse_loss(p, torch.ones_like(p)) for p in model.parameters())
        loss.backward()
        losses.append(loss.item())
        gradient = model.get_parameter("0.weight").grad
        if step == 1:  # as in fp16, in one element, which one rank has
            with torch.no_grad():
                gradient.copy_(torch.where(gradient == gradient.max(), math.inf, gradient))
        if all(torch.isfinite(p.grad).all() for p in model.parameters()):
            total = sum(p.grad.norm().item() ** 2 for p in model.parameters()) ** 0.5
            with torch.no_grad():
                for p in model.parameters():
                    p.grad.mul_(min(1.0, 0.5 / total))
            optimizer.step()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(min(1.0, 3.0 / p.norm().item()))
        optimizer.zero_grad()
    return losses


def test_two_ranks() -> None:
    on_ranks(2, compare_weights, "d=2", [((8, 6), "d,-"), ((8, 6), "-,d"), ((15, 6), "d,-")])


def test_four_ranks() -> None:
    on_ranks(4, compare_weights, "a=2,b=2", [((8, 6), "a,b"), ((8, 6), "b*a,-")])


def test_loops() -> None:
    on_ranks(2, loops_of_users)


def one_rank_is_late() -> None:
    compiled = autoshard.compile(nn.Linear(6, 8), "d=2", (torch.zeros(2, 6),), seeds={"weight": "d,-"}, cluster="cpu-gloo", cache=False)
    rank, told = torch.distributed.get_rank(), []
    with patch.object(dtensor_ops, "LONG", 0.5), patch.object(dtensor_ops.log, "warning", lambda text, *args: told.append(text % args)):
        time.sleep(4.0 * rank)
        compiled.weight.detach().sum().item()
    assert rank or len(told) == 1 and "rank 0 has waited" in told[0] and "test_dtensor_ops.py" in told[0] and "sum().item()" in told[0]


def test_a_rank_that_waits_for_the_others_says_so() -> None:
    on_ranks(2, one_rank_is_late)


def test_nothing_is_mended_twice() -> None:
    """A function that torch has of its own stays."""
    from autoshard import _torch

    kept = lambda op, args, kwargs: None  # noqa: E731
    op = torch.ops.aten.special_zeta.default
    _torch.on_dtensors(op, kept)
    _torch.on_dtensors(op, whole)
    assert torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers.pop(op) is kept
