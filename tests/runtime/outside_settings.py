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


TRAINER = Trainer()
WEAK = ref(TRAINER)
BODIES = {
    "property of a class": (lambda m, x: x * OfKind.scale, lambda m, v: setattr(OfKind, "half", v / 2)),
    "weak reference": (lambda m, x: x * WEAK().temperature, lambda m, v: setattr(TRAINER, "temperature", v)),
}
