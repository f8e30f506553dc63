"""What a model asks of data that it made itself is answered; what is another model while it is compiled is traced as in eager mode."""
import functools

import pytest
import torch
from torch import nn

from autoshard.errors import TraceError
from autoshard.program.interpret import run
from autoshard.program.trace import trace


class Body(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.linear, self.body = nn.Linear(8, 8), body
        self.register_buffer("scale", torch.ones(8))
        self.steps = torch.tensor([1.0, 3.0])

    def forward(self, x):
        return self.body(self, x)


def mask_of_ones(m, x):
    mask = torch.ones(x.shape[0], 8, dtype=torch.bool).tril()
    return m.linear(x) if mask[-1].all() and not mask.all() else x


def a_length(m, x):
    return m.linear(x)[:, : int(torch.arange(4).max()) + 1] * float(m.steps.sum())


def equal(m, x):
    return m.linear(x) if torch.equal(torch.zeros(3), torch.full((3,), 0.0)) else x


def asks(m, x):
    return m.linear(x) * 3 if torch.compiler.is_compiling() else m.linear(x)


@pytest.mark.parametrize("body", [mask_of_ones, a_length, equal, asks])
def test_the_graph_is_the_model(body):
    model, x = Body(body), torch.randn(8, 8)
    traced = trace(model, (x,))
    state = {n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers())}
    assert torch.equal(run(traced, state, (x,)).users[0], model(x))


@pytest.mark.parametrize("data", [lambda m, x: x, lambda m, x: m.scale * x[0], lambda m, x: m.linear.weight, lambda m, x: torch.rand(4),
                                  lambda m, x: torch.empty(4), lambda m, x: torch.ones(8) * x, lambda m, x: torch.ones(1 << 27)])
def test_what_may_change_is_not_looked_at(data):
    def body(m, x):
        return m.linear(x) if float(data(m, x).detach().sum()) > 0 else x

    with pytest.raises(TraceError, match="depends on the data of a tensor"):
        trace(Body(body), (torch.ones(8, 8),))


@functools.lru_cache(maxsize=4)
def bounded(n):
    return torch.arange(n) * 2.0, n


@functools.cache
def unbounded(n):
    return torch.arange(n) * 3.0


def caches(m, x):
    if torch.compiler.is_compiling():
        return m.linear(x)
    return m.linear(x) * bounded(8)[0] + unbounded(8)


def test_tensors_of_a_trace_do_not_stay_in_caches():
    """A library that is told it runs in eager mode may cache; the user's model must not get what the trace left there."""
    bounded(3)
    model, x = Body(caches), torch.randn(8, 8)
    traced = trace(model, (x,))
    want = model.linear(x) * torch.arange(8) * 2 + torch.arange(8) * 3
    assert torch.allclose(model(x), want)
    state = {n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers())}
    assert torch.equal(run(traced, state, (x,)).users[0], model(x))
    assert torch.equal(run(trace(model, (x,)), state, (x,)).users[0], model(x)), "and what the model cached is a constant"
    assert torch.compiler.is_compiling.__module__ == "torch.compiler"


OUTSIDE = torch.randn(6, generator=torch.Generator().manual_seed(3))
OF_CONSTANTS = {
    "like": lambda x: x + torch.zeros_like(OUTSIDE).add_(x[0]),
    "empty like": lambda x: x + torch.empty_like(OUTSIDE).copy_(x[0]),
    "new": lambda x: x + OUTSIDE.new_ones(6).mul_(x[0]),
    "clone": lambda x: x + OUTSIDE.clone().mul_(2),
    "product": lambda x: x + (OUTSIDE * 2).add_(1),
    "rows": lambda x: x + _set_first(OUTSIDE[None].expand(4, 6).contiguous(), x),
    "mask": lambda x: x + torch.zeros_like(OUTSIDE > 0, dtype=x.dtype).masked_fill_(OUTSIDE > 0, 5.0),
}
INTO_CONSTANTS = {
    "itself": lambda x: x + OUTSIDE.add_(1),
    "a view": lambda x: x + OUTSIDE.view(2, 3).mul_(2).view(6),
    "a detached view": lambda x: x + OUTSIDE.detach().zero_(),
}


def _set_first(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    rows[:, 0] = x[:, 0]
    return rows


class Maps(torch.nn.Module):
    def __init__(self, way) -> None:
        super().__init__()
        self.weight, self.way = torch.nn.Parameter(torch.ones(6)), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.way(x * self.weight)


@pytest.mark.parametrize("name", OF_CONSTANTS)
def test_what_is_made_of_a_constant_may_be_written(name):
    model, x = Maps(OF_CONSTANTS[name]), torch.randn(4, 6)
    traced = trace(model, (x,))
    state = dict(model.named_parameters()) | dict(traced.calling.constants)
    assert torch.equal(run(traced, state, (x,)).users[0], model(x))


@pytest.mark.parametrize("name", INTO_CONSTANTS)
def test_a_constant_may_not(name):
    with pytest.raises(TraceError, match=r"writes in place where torch does not make it functional at .*test_constants\.py:\d+"):
        trace(Maps(INTO_CONSTANTS[name]), (torch.randn(4, 6),))


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_loss_module_has_no_weights_of_its_own(kind):
    """They would not be trained, or written."""
    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(6), requires_grad=kind == "parameter")

        def forward(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            if kind == "buffer":
                self.scale.mul_(0.9)
            return ((y * self.scale - target) ** 2).mean()

    with pytest.raises(TraceError, match=r"at .*test_constants\.py:\d+.*A loss module with parameters or buffers of its own: make it a submodule"):
        trace(torch.nn.Linear(6, 6), (torch.randn(4, 6), torch.randn(4, 6)), loss_fn=Loss())
