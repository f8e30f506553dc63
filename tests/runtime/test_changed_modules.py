"""What a user changes on a compiled model has its effect, or raises."""
from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import UsageError


class Scaled(nn.Module):
    factor = 1.0
    type = "linear"
    """As a method of modules is called."""

    def __init__(self) -> None:
        super().__init__()
        self.half: bool = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.factor if self.type == "linear" else x.square()
        return x / 2 if self.half else x


class Model(nn.Module):
    scale = 1.0
    kind: str | None = None
    float = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.double, self.options = 1.0, 1.0
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head, self.scaled = nn.Linear(8, 3), Scaled()
        self._hidden, self.shift, self.order = 1.0, torch.zeros(()), (0, 1, 2)
        self.act: Callable = torch.relu
        self.merged: list[str] = []

    @property
    def strength(self) -> float:
        return self._hidden

    @strength.setter
    def strength(self, value: float) -> None:
        self._hidden = value

    def harden(self, value: float) -> None:
        self._hidden = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.scaled(self.head(self.act(self.body(x)))) * self.scale * self.strength + self.shift + len(self.merged)
        h = h * self.double * self.float * self.options
        return (h if self.kind is None else h.square())[:, list(self.order)]


CHANGES: dict[str, Callable[[Model], object]] = {
    "default of the class": lambda m: setattr(m, "scale", 3.0),
    "default of a submodule's class": lambda m: setattr(m.scaled, "factor", 3.0),
    "name of a method": lambda m: setattr(m.scaled, "half", True),
    "name of a method, in the class": lambda m: setattr(m.scaled, "type", "square"),
    "name of a method of the model": lambda m: setattr(m, "double", 3.0),
    "name of a method of the model, in the class": lambda m: setattr(m, "float", 3.0),
    "name of an attribute of compiled models": lambda m: setattr(m, "options", 3.0),
    "text": lambda m: setattr(m, "kind", "square"),
    "private": lambda m: setattr(m, "_hidden", 3.0),
    "property": lambda m: setattr(m, "strength", 3.0),
    "method": lambda m: m.harden(3.0),
    "tensor": lambda m: setattr(m, "shift", torch.ones(())),
    "tuple": lambda m: setattr(m, "order", (2, 0)),
    "function": lambda m: setattr(m, "act", torch.tanh),
    "names in a list": lambda m: m.merged.append("adapter"),
    "eps": lambda m: setattr(m.body[1], "eps", 0.5),
}


def pair(called: bool) -> tuple[nn.Module, Model, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(5, 6)
    compiled = autoshard.compile(copy.deepcopy(model), "d=1", cluster="cpu-gloo", cache=False)
    if called:
        compiled(x)
    return compiled, model, x


@pytest.mark.parametrize("called", [False, True], ids=["before the first call", "after it"])
@pytest.mark.parametrize("name", CHANGES)
def test_attributes_have_their_effect(name: str, called: bool) -> None:
    compiled, model, x = pair(called)
    before = model(x)
    for m in (compiled, model):
        CHANGES[name](m)
    assert model(x).shape != before.shape or not torch.allclose(model(x), before), "the change changes something"
    assert torch.allclose(compiled(x), model(x))


def test_a_change_taken_back_is_the_variant_that_was_there() -> None:
    compiled, model, x = pair(True)
    first, shift = model(x), compiled.shift
    for value in (3.0, 1.0):
        compiled.strength = value
        compiled(x)
    compiled.shift = torch.ones(())
    assert torch.allclose(compiled(x), first + 1)
    compiled.shift = shift
    assert torch.allclose(compiled(x), first) and len(compiled._steps) == 3


@pytest.mark.parametrize("name", ["function", "tensor", "property", "default of the class"])
def test_a_copy_has_the_changes_and_goes_on_from_them(name: str) -> None:
    """Also with the variants that were there before the change."""
    compiled, model, x = pair(True)
    first = model(x)
    before = compiled.act, compiled.shift
    for m in (compiled, model):
        CHANGES[name](m)
    early = copy.deepcopy(compiled)
    for copied in (early, copy.deepcopy(compiled)):
        assert torch.allclose(copied(x), model(x)) and torch.allclose(compiled(x), model(x))
    late = copy.deepcopy(compiled)
    late.act, late.shift, late.strength, late.scale = *before, 1.0, 1.0
    assert torch.allclose(late(x), first) and torch.allclose(compiled(x), model(x))


@pytest.mark.parametrize("called", [False, True], ids=["before the first call", "after it"])
@pytest.mark.parametrize(("change", "said"), [
    (lambda m: setattr(m, "head", nn.Linear(8, 3)), "head of the compiled model was replaced"),
    (lambda m: m.body.__setitem__(2, nn.GELU()), r"body\.2 of the compiled model was replaced"),
    (lambda m: m.body.append(nn.Tanh()), r"body\.3 of the compiled model was added"),
    (lambda m: m.body.__delitem__(2), r"body\.2 of the compiled model was replaced or taken out"),
    (lambda m: setattr(m.body[2], "forward", torch.tanh), r"body\.2\.forward of the compiled model was replaced"),
])
def test_other_modules_raise(change: Callable, said: str, called: bool) -> None:
    compiled, _, x = pair(called)
    change(compiled)
    with pytest.raises(UsageError, match=f"{said}.*compile the changed model"):
        compiled(x)


class FrozenNorm(nn.Module):
    """Keeps its batch norm in evaluation, as detection models do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))


@pytest.mark.parametrize("wrapped", [False, True])
def test_train_and_eval_are_those_of_the_models_class(wrapped: bool) -> None:
    model = nn.Sequential(FrozenNorm()) if wrapped else FrozenNorm()
    compiled, x = autoshard.compile(copy.deepcopy(model).train(), "one=1", cache=False), torch.randn(5, 6)
    for mode in ("eval", "train", "train"):
        assert getattr(compiled, mode)() is compiled and compiled.training is (mode == "train")
        getattr(model, mode)()
        torch.testing.assert_close(compiled(x), model(x))
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(compiled.get_buffer(name), buffer)
