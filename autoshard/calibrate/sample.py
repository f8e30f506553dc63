"""One measurement as data. Fit, errors and plots use only this data, so they need no machine."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from autoshard.rules.family import Family

Kind = Literal["collective", "op", "optimizer", "view", "step"]


@dataclass(frozen=True)
class Sample:
    """One size of one thing.

    key       the collective, the op ("aten::gelu", "aten::view") or the optimizer
    family    op family; None for collectives and the optimizer
    dtype     torch's name of the dtype an op computes in; "" for collectives
    link, ranks   for collectives: index of the profile's link, and ranks of the group
    nbytes    for collectives: the buffer, by the convention of collectives/__init__.py
    amount    what its curve is a function of: bytes on the wire, bytes moved, or FLOP; 1 for a view, the
              parameters of a step
    seconds   mean over rounds of the slowest rank, without the extreme ones
    spread    upper quartile / lower quartile of the rounds - 1: the noise
    held_out  not used in the fit, only to test it
    """

    kind: Kind
    key: str
    amount: float
    seconds: float
    held_out: bool
    family: Family | None = None
    dtype: str = ""
    link: int = 0
    ranks: int = 1
    nbytes: float = 0.0
    moved: float = 0.0
    spread: float = 0.0


@dataclass(frozen=True)
class Machine:
    """What is known of the machine without measuring. `devices[i]`: ranks that link i joins (the last has no limit). `conditions`: see `Cluster`."""

    name: str
    device: str
    backend: str
    ranks: int
    memory: float
    links: tuple[str, ...]
    devices: tuple[int, ...]
    made: str
    conditions: Mapping[str, str] = field(default_factory=dict)
