"""Numbers that code reads from outside of its arguments may change between calls: the compiled model computes what the model does."""
from __future__ import annotations

import copy
import logging
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import autoshard
from tests.runtime import outside_settings

SCALE = 1.0
INNER, HELD = {v: SimpleNamespace(scale=v) for v in (1.0, 0.5)}, {v: torch.tensor(v) for v in (1.0, 0.5)}
step = 0
"""Like the variable of a training loop, and like an attribute that code names."""
TABLE = {"scale": 1.0, "calls": 0}
CALLS = 0


class Named:
    """A class that holds numbers."""

    scale = 1.0
    inner = SimpleNamespace(scale=1.0)
    table: ClassVar = {"scale": 1.0}

    @classmethod
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x * cls.inner.scale

    @staticmethod
    def of_file(x: torch.Tensor) -> torch.Tensor:
        return by_global(x)


class Base:
    """Its method is called by `super()`."""

    def factor(self) -> float:
        return self.scale  # type: ignore[attr-defined, no-any-return]


class Weight(Base):
    """An object that says by operators what it holds."""

    def __init__(self) -> None:
        self.scale = 1.0

    def factor(self) -> float:
        return super().factor() * 1.0

    def __float__(self) -> float:
        return self.scale

    def __iter__(self) -> Iterator[float]:
        yield self.scale


class Renamed:
    """A config with other names for some of its attributes."""

    names: ClassVar = {"scale": "factor"}

    def __init__(self) -> None:
        self.factor = 1.0

    def __getattr__(self, name: str) -> Any:
        if name not in type(self).names:
            raise AttributeError(name)
        return getattr(self, type(self).names[name])


class Scaled(torch.autograd.Function):
    """Reads a global."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * SCALE

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * SCALE


class Part(nn.Module):
    """Of a loss or of a function's own modules."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.calls = SimpleNamespace(scale=1.0), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.config.scale


@dataclass
class Config:
    """As models hold one."""

    scale: float = 1.0
    doubled: bool = False
    by_text: float = 1.0
    loss: float = 0.0  # that no code names
    inner: Any = field(default_factory=lambda: SimpleNamespace(scale=1.0, act=torch.relu, step=0))
    size: tuple[float, ...] = (1.0, 1.0)

    def as_it_is(self) -> float:
        return self.scale

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    @staticmethod
    def of_file(x: torch.Tensor) -> torch.Tensor:
        return by_global(x)

    @property
    def squared(self) -> float:
        return self.scale**2


class Slotted:
    """Without a table of attributes."""

    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


def by_global(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


@contextmanager
def scaled() -> Iterator[float]:
    yield SCALE


def in_context(_: Any, x: torch.Tensor) -> torch.Tensor:
    with scaled() as scale:
        return x * scale


def by_import(_: Any, x: torch.Tensor) -> torch.Tensor:
    from tests.runtime import outside_settings

    return outside_settings.scaled(x)


def by_default(x: torch.Tensor, scales: tuple[list[float], ...] = ([1.0],)) -> torch.Tensor:
    return x * scales[0][0]


def by_attribute(x: torch.Tensor) -> torch.Tensor:
    return x * by_attribute.scale  # type: ignore[attr-defined, no-any-return]


by_attribute.scale = 1.0  # type: ignore[attr-defined]
WEIGHT, RENAMED, PARTS = Weight(), Renamed(), nn.Sequential(Part())
HELD_IN = partial(lambda config, x: x * config.scale, WEIGHT)
FLAGS: set[str] = set()
BY_KIND = {("a", 1): 1.0, "other": 1.0}
LOSSES = {"ce": 1.0, "other": 1.0}


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return function(*args)

    return call


twice_wrapped = wrapped(wrapped(by_global))


def around(value: float) -> tuple[Callable[..., Any], Callable[..., None]]:
    def read(x: torch.Tensor) -> torch.Tensor:
        return x * value

    def write(new: float) -> None:
        nonlocal value
        value = new

    return read, write


READ, WRITE = around(1.0)
OTHER, OTHER_WRITE = around(1.0)


class Model(nn.Module):
    """`forward` is one of BODIES."""

    scale_of_class = 1.0

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.body = nn.Linear(4, 4), body
        self.config, self.slotted, self.scales, self.table = Config(), Slotted(), [1.0, 1.0], {"scale": 1.0}
        self.parts = (Config(),)
        self.named, self.size = "by_text", (1.0,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, self.layer(x))

    def of_method(self) -> float:
        return self.config.scale + 0 * self.config.inner.step


def of_global(value: float) -> None:
    globals()["SCALE"] = value


BODIES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    **outside_settings.BODIES,
    "global": (lambda m, x: x * SCALE, lambda m, v: of_global(v)),
    "function of a global": (lambda m, x: by_global(x), lambda m, v: of_global(v)),
    "decorated": (lambda m, x: twice_wrapped(x), lambda m, v: of_global(v)),
    "in a list": (lambda m, x: sum([x * SCALE for _ in range(2)]), lambda m, v: of_global(v)),
    "in a lambda": (lambda m, x: (lambda: x * SCALE)(), lambda m, v: of_global(v)),
    "variable around": (lambda m, x: READ(x), lambda m, v: WRITE(v)),
    "two variables around": (lambda m, x: OTHER(READ(x)), lambda m, v: OTHER_WRITE(v)),
    "class": (lambda m, x: x * Named.scale, lambda m, v: setattr(Named, "scale", v)),
    "class of the module": (lambda m, x: x * m.scale_of_class, lambda m, v: setattr(Model, "scale_of_class", v)),
    "config": (lambda m, x: x * m.config.scale, lambda m, v: setattr(m.config, "scale", v)),
    "by name": (lambda m, x: x * getattr(m.config, "scale", 3.0), lambda m, v: setattr(m.config, "scale", v)),
    "flag": (lambda m, x: x * 2 if m.config.doubled else x, lambda m, v: setattr(m.config, "doubled", v != 1.0)),
    "config in config": (lambda m, x: x * m.config.inner.scale, lambda m, v: setattr(m.config.inner, "scale", v)),
    "method of config": (lambda m, x: x * m.config.as_it_is(), lambda m, v: setattr(m.config, "scale", v)),
    "property of config": (lambda m, x: x * m.config.squared, lambda m, v: setattr(m.config, "scale", v)),
    "called config": (lambda m, x: m.config(x), lambda m, v: setattr(m.config, "scale", v)),
    "static method": (lambda m, x: m.config.of_file(x), lambda m, v: of_global(v)),
    "object in a tuple": (lambda m, x: m.parts[0](x), lambda m, v: setattr(m.parts[0], "scale", v)),
    "method": (lambda m, x: x * m.of_method(), lambda m, v: setattr(m.config, "scale", v)),
    "slots": (lambda m, x: x * m.slotted.scale, lambda m, v: setattr(m.slotted, "scale", v)),
    "table": (lambda m, x: x * m.table["scale"], lambda m, v: m.table.update(scale=v)),
    "table of the file": (lambda m, x: x * TABLE["scale"], lambda m, v: TABLE.update(scale=v)),
    "whole table": (lambda m, x: x * sum(m.table.values()), lambda m, v: m.table.update(scale=v)),
    "item": (lambda m, x: x * m.scales[0], lambda m, v: m.scales.__setitem__(0, v)),
    "items": (lambda m, x: x * sum(m.scales), lambda m, v: m.scales.__setitem__(1, v)),
    "size": (lambda m, x: x * sum(m.config.size), lambda m, v: setattr(m.config, "size", (v, v))),
    "numpy": (lambda m, x: x * m.config.inner.scale, lambda m, v: setattr(m.config.inner, "scale", np.float32(v))),
    "function": (lambda m, x: m.config.inner.act(x), lambda m, v: setattr(m.config.inner, "act", torch.relu if v == 1.0 else torch.tanh)),
    "another object": (lambda m, x: x * m.config.inner.scale, lambda m, v: setattr(m.config, "inner", INNER[v])),
    "tensor": (lambda m, x: x * m.config.inner.scale, lambda m, v: setattr(m.config.inner, "scale", HELD[v])),
    "object of a class": (lambda m, x: x * Named.inner.scale, lambda m, v: setattr(Named.inner, "scale", v)),
    "table of a class": (lambda m, x: x * Named.table["scale"], lambda m, v: Named.table.update(scale=v)),
    "class method": (lambda m, x: Named.of_class(x), lambda m, v: setattr(Named.inner, "scale", v)),
    "static method of a class": (lambda m, x: Named.of_file(x), lambda m, v: of_global(v)),
    "super": (lambda m, x: x * WEIGHT.factor(), lambda m, v: setattr(WEIGHT, "scale", v)),
    "float()": (lambda m, x: x * float(WEIGHT), lambda m, v: setattr(WEIGHT, "scale", v)),
    "for": (lambda m, x: x * sum(WEIGHT), lambda m, v: setattr(WEIGHT, "scale", v)),
    "another name": (lambda m, x: x * RENAMED.scale, lambda m, v: setattr(RENAMED, "factor", v)),
    "function of autograd": (lambda m, x: Scaled.apply(x), lambda m, v: of_global(v)),
    "library's decorator": (in_context, lambda m, v: of_global(v)),
    "import in a function": (by_import, lambda m, v: setattr(outside_settings, "SCALE", v)),
    "default": (lambda m, x: by_default(x), lambda m, v: by_default.__defaults__[0][0].__setitem__(0, v)),
    "attribute of a function": (lambda m, x: by_attribute(x), lambda m, v: setattr(by_attribute, "scale", v)),
    "partial": (lambda m, x: HELD_IN(x), lambda m, v: setattr(WEIGHT, "scale", v)),
    "set": (lambda m, x: x * (1.0 if "off" not in FLAGS else 0.5), lambda m, v: FLAGS.discard("off") if v == 1.0 else FLAGS.add("off")),
    "key that is no text": (lambda m, x: x * BY_KIND["a", 1] * BY_KIND["other"], lambda m, v: BY_KIND.update({("a", 1): v})),
    "all but one key": (lambda m, x: x * sum(v for k, v in LOSSES.items() if k != "other"), lambda m, v: LOSSES.update(ce=v)),
    "name in a text": (lambda m, x: x * getattr(m.config, m.named), lambda m, v: setattr(m.config, "by_text", v)),
    "modules of a function": (lambda m, x: PARTS(x), lambda m, v: setattr(PARTS[0].config, "scale", v)),
    "one item more": (lambda m, x: x * sum(m.scales), lambda m, v: setattr(m, "scales", m.scales[:2]) if v == 1.0 else m.scales.append(v)),
}


BY_OBJECT = ("set", "one item more", "another object", "tensor", "weak reference to what goes")
"""What a copy of the model holds is another object; a set has one item more."""


def compiled(model: nn.Module) -> Any:
    return autoshard.compile(model, "one=1", training=False, cluster="cpu-gloo", cache=False)


@pytest.mark.parametrize("form", BODIES)
@torch.no_grad()
def test_a_number_that_changes_is_another_variant(form: str) -> None:
    body, change = BODIES[form]
    model, x = Model(body), torch.randn(2, 4)
    fast = compiled(model)
    try:
        for value in (1.0, 1.0, 0.5, 1.0, 0.5):
            change(model, value)
            change(fast, value)
            globals()["step"] += 1
            fast.config.loss = model.config.loss = fast.config.loss + 0.5
            assert torch.allclose(fast(x), model(x)), f"{form} at {value}"
        variants = len(fast._steps)
        twin = copy.deepcopy(fast)
        for value in (1.0, 0.5):
            change(model, value)
            change(twin, value)
            assert torch.allclose(twin(x), model(x)), f"the copy, {form} at {value}"
        assert form in BY_OBJECT or len(twin._steps) == variants == 2, "a variant for each number, none for what no code names"
    finally:
        change(model, 1.0)


def counts(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    global CALLS
    CALLS += 1
    TABLE["calls"] += 1
    return x * (1.0 if CALLS and TABLE["calls"] else 2.0)


def test_what_forward_writes_itself_gives_no_variants() -> None:
    fast, x = compiled(Model(counts)), torch.randn(2, 4)
    for _ in range(3):
        fast(x)
    assert CALLS < 3, "a call for each trace"
    assert len(fast._steps) == 1


def test_a_number_that_changes_in_every_step_is_told(caplog: pytest.LogCaptureFixture) -> None:
    body, change = BODIES["config"]
    fast, x = compiled(Model(body)), torch.randn(2, 4)
    with caplog.at_level(logging.WARNING, "autoshard"):
        for step in range(10):
            change(fast, 1.0 + step)
            fast(x)
    told = [r.getMessage() for r in caplog.records if "values in calls" in r.getMessage()]
    assert len(told) == 1 and "Model.config.scale has had 8 values" in told[0] and "as a tensor" in told[0]


@torch.no_grad()
def test_objects_that_come_back_may_have_changed() -> None:
    fast, x = compiled(Model(BODIES["another object"][0])), torch.randn(2, 4)
    first, other = SimpleNamespace(scale=1.0), SimpleNamespace(scale=2.0)
    ones = fast(x)
    for held, value in ((first, 1.0), (other, 2.0), (first, 1.0), (first, 3.0), (other, 4.0)):
        held.scale, fast.config.inner = value, held
        assert torch.allclose(fast(x), ones * value)


def test_equal_tuples_are_one_variant() -> None:
    fast, x = compiled(Model(lambda m, x: x * m.size[0])), torch.randn(2, 4)
    for value in (1.0, 0.5, 1.0, 0.5):
        fast.size = (value,)
        fast(x)
    assert len(fast._steps) == 2


def test_parts_of_a_loss_module_count_and_what_it_does_not_read_does_not() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.total = Part(), 0.0

        def forward(self, out: torch.Tensor, target: torch.Tensor) -> Any:
            return self.part(out - target).sum()

    loss, model, x = Loss(), nn.Linear(4, 4), torch.randn(2, 4)
    fast = autoshard.compile(model, "one=1", loss_fn=loss, training=False, cluster="cpu-gloo", cache=False)
    for value in (1.0, 2.0, 1.0):
        loss.part.config.scale = value
        assert torch.allclose(fast(x, x), loss(model(x), x))
        loss.total += 1.0
        loss.part.calls += 1
    assert len(fast._steps) == 2


class Raising:
    """Code of its own fails."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


class File(UserDict[str, Any]):
    """A table that is read when it is asked, and is closed by now."""

    def __getitem__(self, key: str) -> Any:
        raise OSError("closed")

    def __iter__(self) -> Iterator[str]:
        return iter(str(i) for i in range(10**9))


def test_objects_whose_own_code_fails_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    fast = compiled(Model(lambda m, x: x if x is not None else m.config.inner.act.scale))
    with caplog.at_level(logging.WARNING, "autoshard"):
        for held in (Raising(), File(), mock.Mock(spec=nn.Linear), mock.MagicMock(), {i: {j: [j] for j in range(99)} for i in range(99)}):
            fast.config.inner = SimpleNamespace(scale=1.0, act=held)
            fast._outside._find()
            assert fast._outside._now() == fast._outside._values or not isinstance(held, dict)
    assert len([r for r in caplog.records if "more than" in r.getMessage()]) <= 1
