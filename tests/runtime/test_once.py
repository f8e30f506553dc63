"""What autograd asks of the one node that a program is: gradients of gradients, results that a loss leaves out, a checkpoint around it."""
from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.errors import UsageError


class Heads(nn.Module):
    """Two results with a trunk, one of a parameter alone, and two without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 2)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.trunk(x).tanh()
        return self.a(h), self.b(h), (h > 0).sum(), self.scale * 2, h.detach()


def pair(model: nn.Module, **options) -> tuple[nn.Module, nn.Module]:
    """The model in float64, compiled and as it is."""
    model = model.double()
    return autoshard.compile(copy.deepcopy(model), "d=1", cluster="cpu-gloo", cache=False, **options), model


def rows() -> torch.Tensor:
    return torch.randn(4, 6, dtype=torch.float64)


def test_a_gradient_penalty_is_refused() -> None:
    """Its gradient was 0: torch takes gradients for constants where what arrives at the node needs no gradient."""
    fast, _ = pair(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)))
    x = rows().requires_grad_()
    score = fast(x)
    slope, = torch.autograd.grad(score.sum(), x, create_graph=True)
    with pytest.raises(UsageError, match="a gradient penalty.*no second backward"):
        (score.mean() + (slope.norm(dim=1) - 1).square().mean()).backward()


@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_of_gradients_of_parameters_are_refused(microbatches: int) -> None:
    fast, _ = pair(nn.Linear(6, 3), loss_fn=F.mse_loss, pipeline=autoshard.Pipeline(microbatches=microbatches))
    loss = fast(rows(), torch.ones(4, 3, dtype=torch.float64))
    grads = torch.autograd.grad(loss, list(fast.parameters()), create_graph=True)
    with pytest.raises(UsageError, match="no second backward"):
        torch.autograd.grad(grads[0].square().sum(), list(fast.parameters()), allow_unused=True)


@pytest.mark.filterwarnings("ignore:.*create_graph=True will create a reference cycle")
def test_create_graph_alone_changes_nothing() -> None:
    x, models = rows(), pair(Heads())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in models]
    for _ in range(3):
        for m, o in zip(models, optimizers, strict=True):
            o.zero_grad()
            m(x)[0].square().sum().backward(create_graph=True)
            o.step()
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert torch.allclose(p, q, rtol=1e-9)


def test_what_a_loss_leaves_out_has_no_gradient() -> None:
    """Zeros instead of None let weight decay and momentum move the other head."""
    x, models = rows(), pair(Heads())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.1) for m in models]
    for result in (0, 1, 0, 3):
        for m, o in zip(models, optimizers, strict=True):
            o.zero_grad()
            m(x)[result].square().sum().backward()
        assert [p.grad is None for p in models[0].parameters()] == [p.grad is None for p in models[1].parameters()]
        for o in optimizers:
            o.step()
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert torch.allclose(p, q, rtol=1e-9)


def test_inputs_that_a_loss_does_not_reach() -> None:
    fast, model = pair(Heads())
    x = rows().requires_grad_()
    for m in (fast, model):
        given, scale = torch.autograd.grad(m(x)[3].sum(), [x, m.scale], allow_unused=True)
        assert given is None and torch.equal(scale, torch.full_like(scale, 2))


def test_results_left_out_of_the_last_pass_that_accumulates() -> None:
    x, models = rows(), pair(Heads())
    for m in models:
        for result, last in ((1, False), (0, True)):
            with m.no_sync() if m is models[0] and not last else nullcontext():
                m(x)[result].sum().backward()
    fast, model = ({n: p.grad for n, p in m.named_parameters() if n != "scale"} for m in models)
    assert all(torch.allclose(fast[name], model[name]) for name in model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_a_call(reentrant: bool) -> None:
    """The first call is traced in it, and nothing is run again for the trace. Over ranks: tests/dist/loops/test_wrappers.py."""
    x, results = rows(), []
    for m in pair(nn.Sequential(nn.Linear(6, 6), nn.Tanh())):
        given = x.clone().requires_grad_()
        checkpoint(m, given, use_reentrant=reentrant).square().sum().backward()
        results.append((given.grad, *(p.grad for p in m.parameters())))
    assert all(torch.allclose(a, b) for a, b in zip(*results, strict=True))


def test_a_program_of_torch_compile_leaves_the_call_alone() -> None:
    """The first call ended where the trace asks torch.compile to stand back, and later ones were taken apart, with warnings."""
    torch.compiler.reset()
    fast, model = pair(nn.Sequential(nn.Linear(6, 4), nn.Tanh()))
    x = rows()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        around = torch.compile(lambda x: fast(x * 2) + 1, backend="eager")
        assert all(torch.equal(around(x), model(x * 2) + 1) for _ in range(2))
        assert torch.equal(torch.compile(fast, backend="eager")(x), model(x))
    assert not [str(w.message) for w in told if "autoshard" in str(w.message) or "graph break" in str(w.message).lower()]


@pytest.mark.parametrize("used", [(0, 0), (0, 1), (1, 0), (3, 3)])
def test_what_no_pass_of_no_sync_has_a_gradient_for_has_none(used: tuple[int, int]) -> None:
    """It had zeros, and an optimizer with weight decay changed it."""
    fast, model = pair(Heads())
    for m in (fast, model):
        torch.manual_seed(0)
        for i, which in enumerate(used):
            with fast.no_sync() if m is fast and i == 0 else nullcontext():
                m(rows())[which].square().sum().backward()
    given = {n: p.grad for n, p in fast.named_parameters()}
    for name, p in model.named_parameters():
        assert (given[name] is None) == (p.grad is None), name
        assert p.grad is None or torch.allclose(given[name], p.grad, rtol=1e-12), name
