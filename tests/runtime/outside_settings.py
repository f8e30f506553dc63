"""Settings that a function imports where it runs, and others that code reads in roundabout ways."""
from __future__ import annotations

from weakref import ref

import torch

SCALE = 1.0


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


class Kind(type):
    @property
    def scale(cls) -> float:
        return cls.half * 2  # type: ignore[attr-defined, no-any-return]


class OfKind(metaclass=Kind):
    """Its class has the property."""

    half = 0.5  # a method of modules is called so


class Trainer:
    def __init__(self) -> None:
        self.temperature = 1.0


class Defaults:
    scale = 1.0


def of_object(kept: object, name: str, value: float) -> None:
    """Its own attribute, or that of its class."""
    if value == 1.0:
        vars(kept).pop(name, None)
    else:
        setattr(kept, name, value)


def keep(value: float) -> None:
    """The object of `OF_KEPT` is gone, or there is one."""
    if value != 1.0:
        KEPT.clear()
        assert OF_KEPT[0]() is None, "the compiled model does not keep it"
    elif not KEPT:
        KEPT.append(Trainer())
        OF_KEPT[0] = ref(KEPT[0])


TRAINER, DEFAULTS, KEPT = Trainer(), Defaults(), [Trainer()]
WEAK, OF_KEPT = ref(TRAINER), [ref(KEPT[0])]
BODIES = {
    "property of a class": (lambda m, x: x * OfKind.scale, lambda m, v: setattr(OfKind, "half", v / 2)),
    "weak reference": (lambda m, x: x * WEAK().temperature, lambda m, v: setattr(TRAINER, "temperature", v)),
    "weak reference to what goes": (lambda m, x: x * (0.5 if OF_KEPT[0]() is None else OF_KEPT[0]().temperature), lambda m, v: keep(v)),
    "attribute in place of its class's": (lambda m, x: x * DEFAULTS.scale, lambda m, v: of_object(DEFAULTS, "scale", v)),
}
