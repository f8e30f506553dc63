"""Functions among a model's attributes and hooks hold on to its modules and weights: minGPT calls its MLP by a lambda, adapters replace `forward`."""
from __future__ import annotations

import copy
import functools

import torch
from torch import nn

import autoshard


class Closures(nn.Module):
    """By a lambda, one in a list, a default, a partial, a `forward` put in place of another, and a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        a, weight, before = self.a, self.a.weight, self.b.forward
        self.first = lambda x: a(x).relu()
        self.more = [lambda x, m=a: m(x), functools.partial(lambda x, scale: scale * self.b(x), scale=2)]
        self.b.forward = lambda x: before(x) * 3
        self.b.register_forward_hook(lambda module, args, out: out + weight.sum())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for f in self.more:
            x = f(x)
        return x


def test_functions_hold_the_copies_of_what_they_held() -> None:
    model = Closures()
    assert autoshard.verify(model, "d=2", (torch.randn(4, 8),), plans=["split", "random:1"]).ok


def test_weights_that_functions_hold_are_those_of_the_compiled_model() -> None:
    torch.manual_seed(0)
    model, x = Closures(), torch.randn(4, 8)
    reference, fast = copy.deepcopy(model.state_dict()), autoshard.compile(model, "one=1", cache=False)
    fast(x).sum().backward()
    torch.optim.SGD(fast.parameters(), lr=0.1).step()
    assert all(torch.equal(reference[name], t) for name, t in model.state_dict().items()), "the user's weights changed"
    model.load_state_dict(fast.state_dict())
    torch.testing.assert_close(fast(x), model(x))
