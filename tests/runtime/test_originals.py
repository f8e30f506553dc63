"""What goes on with the parameters that a model had before `compile`, which copies them."""
from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import UsageError

X = torch.ones(2, 4)


def compiled(model: nn.Module) -> nn.Module:
    return autoshard.compile(model, "d=1", cluster="cpu-gloo", cache=False)


def test_an_optimizer_made_before_compile_says_so_where_it_would_update_nothing() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    copied = compiled(model)
    optimizer.step()  # nobody has a gradient yet
    copied(X).sum().backward()
    with pytest.raises(UsageError, match="weight of the compiled model has a gradient, and its original has none"):
        optimizer.step()
    model(X).sum().backward()  # who trains both may
    optimizer.step()


def test_a_closure_computes_gradients_of_originals() -> None:
    model = nn.Linear(4, 3)
    copied = compiled(model)
    copied(X).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss() -> torch.Tensor:
        value = model(X).sum()
        value.backward()
        return value

    optimizer.step(loss)


@pytest.mark.parametrize(("trained", "again", "warns"), [(True, False, True), (False, False, False), (True, True, False)],
                         ids=["a trunk that trains", "a frozen trunk", "a model compiled twice"])
def test_models_that_share_parameters_train_apart_and_say_so(trained: bool, again: bool, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    trunk = nn.Linear(4, 4).requires_grad_(trained)
    first = nn.Sequential(trunk, nn.Linear(4, 1))
    with caplog.at_level(logging.WARNING, "autoshard"):
        kept = compiled(first), compiled(first if again else nn.Sequential(trunk, nn.Linear(4, 2)))
    assert len(kept) == 2 and ("0.weight, 0.bias are also in a model that was compiled before" in caplog.text) == warns


@pytest.mark.parametrize("memory", [torch.Tensor.clone, lambda t: torch.from_numpy(t.numpy().copy())], ids=["of torch", "of numpy"])
def test_before_the_first_call_either_may_be_written_too(memory, caplog) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    for t in model.state_dict(keep_vars=True).values():
        t.data = memory(t.detach())
    before, (one, other) = {n: t.clone() for n, t in model.state_dict().items()}, (compiled(model), compiled(model))
    one.load_state_dict({n: torch.ones_like(t) for n, t in before.items()})
    assert all(torch.equal(t, before[n]) for m in (model, other) for n, t in m.state_dict().items())
    if memory is not torch.Tensor.clone:
        return
    nn.init.zeros_(model[0].weight)
    with torch.no_grad():
        other[1].running_mean.add_(1.0)
    assert torch.equal(model[1].running_mean, before["1.running_mean"]) and torch.equal(one[1].running_mean, torch.ones(3))
    with caplog.at_level(logging.WARNING, "autoshard"):
        other(X)
    assert "0.weight of the original model changed between autoshard.compile and the first call" in caplog.text
    assert torch.equal(other[0].weight, before["0.weight"]) and torch.equal(one[0].weight, torch.ones(3, 4))
