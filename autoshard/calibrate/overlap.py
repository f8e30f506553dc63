"""How much of a collective hides behind compute, measured: the two numbers of a profile's [overlap].

Alone a matmul loop takes T and an all_reduce C. Started together they take, by the formula of docs/costs.md,

    T + interference x C + (1 - interference) x max(0, C - eta x T)

so a short collective (C about T/2) gives interference, and a long one (C about 2 T) then gives eta.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autoshard import _torch
from autoshard.calibrate.measure import Stopwatch
from autoshard.cost.cluster import Overlap
from autoshard.runtime.place import Place

SIDE = 512
TARGET = 0.03
"""Seconds of compute to hide behind: long beside the start of a collective."""
USELESS = 0.95
"""Above this interference hiding gains nothing that can be told from noise."""


@dataclass(frozen=True)
class Timing:
    """Seconds of compute alone, the collective alone, and both started together."""

    compute: float
    collective: float
    both: float

    @property
    def hidden(self) -> float:
        """Share of the shorter of the two that running together saved."""
        return (self.compute + self.collective - self.both) / min(self.compute, self.collective)


def measure_overlap(place: Place, rounds: int = 7) -> tuple[Timing, Timing]:
    """Timings with a collective shorter and one longer than the compute. Needs an axis of more than one rank."""
    watch = Stopwatch(place)
    axis = max(range(place.mesh.ndim), key=lambda i: place.mesh.sizes[i])
    a, tag = torch.randn(SIDE, SIDE, device=place.device), place.groups[place.mesh.names[axis]]
    loops = max(1, int(TARGET / _agreed(watch, lambda: a @ a, 3)))
    per_byte = _agreed(watch, _reduce(place, tag, 2**22), 3) / 2**22

    def compute() -> None:
        for _ in range(loops):
            a @ a

    short, long = (_timing(watch, compute, place, tag, int(share * TARGET / per_byte), rounds) for share in (0.5, 2.0))
    return short, long


def fitted(short: Timing, long: Timing) -> Overlap:
    """The profile's numbers from two timings. T = 30 ms; C = 15 ms, both 36 ms: interference 0.4.
    Then C = 60 ms, both 75 ms: eta = (30 + 60 - 75) / (0.6 x 30) = 0.83."""
    interference = min(max((short.both - short.compute) / short.collective, 0.0), 1.0)
    if interference > USELESS:
        return Overlap(0.0, 1.0)
    eta = (long.compute + long.collective - long.both) / ((1 - interference) * long.compute)
    return Overlap(min(max(eta, 0.0), 1.0), interference)


def _timing(watch: Stopwatch, compute: Callable[[], None], place: Place, tag: str, nbytes: int, rounds: int) -> Timing:
    reduce, start = _reduce(place, tag, nbytes), _start(place, tag, nbytes)

    def both() -> None:
        pending = start()
        compute()
        _torch.WAIT(pending)

    return Timing(*(_agreed(watch, run, rounds) for run in (compute, reduce, both)))


def _start(place: Place, tag: str, nbytes: int) -> Callable[[], Any]:
    x = torch.ones(max(nbytes // 4, 1), device=place.device)
    return lambda: _torch.COLLECTIVES["all_reduce"](x, "sum", tag)


def _reduce(place: Place, tag: str, nbytes: int) -> Callable[[], Any]:
    start = _start(place, tag, nbytes)
    return lambda: _torch.WAIT(start())


def _agreed(watch: Stopwatch, run: Callable[[], Any], rounds: int) -> float:
    """Lower quartile over rounds of the slowest rank."""
    own = []
    run()
    for _ in range(rounds):
        watch.barrier()
        own.append(watch.once(run, 1))
    return float(np.percentile(watch.slowest(own), 25))
