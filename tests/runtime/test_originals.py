"""What goes on with the parameters that a model had before `compile`, which copies them."""
from __future__ import annotations

import copy
import logging

import numpy as np
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


@pytest.mark.parametrize("known_to_numpy", [False, True])
def test_original_and_compiled_model_have_weights_of_their_own_before_the_first_call(known_to_numpy: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    if known_to_numpy:  # memory that cannot be copied lazily
        model[0].weight.data = torch.from_numpy(np.ones((4, 4), np.float32))
    before, x = copy.deepcopy(model), torch.randn(3, 4)
    one, other = compiled(model), compiled(model)
    with torch.no_grad():
        one[0].weight.mul_(2)
        one[1].running_mean.add_(1)
        model[0].bias.zero_()
        want = copy.deepcopy(before)
        want[0].weight.mul_(2)
        want[1].running_mean.add_(1)
        torch.testing.assert_close(one(x), want(x))
        torch.testing.assert_close(other(x), before(x))
    torch.testing.assert_close(model[0].weight, before[0].weight)
    torch.testing.assert_close(model[1].running_mean, before[1].running_mean)
