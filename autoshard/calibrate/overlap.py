"""How much of a collective hides behind compute, measured: the two numbers of a profile's [overlap].

Alone a matmul loop takes T and a collective C. Started together they take, by the formula of docs/costs.md,

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
from autoshard.collectives import RUN
from autoshard.cost.cluster import Overlap
from autoshard.runtime.carriers import gloo_messages
from autoshard.runtime.carriers.choose import start
from autoshard.runtime.ranks.place import Place

SIDE = 512
TARGET = 0.03
"""Seconds of compute to hide behind: long beside the start of a collective."""
PROBE = 2**22
"""Bytes of the buffer whose time says how large the others must be."""
NOISE = 0.1
"""Relative: by how much the times of one run may contradict one another without a word."""
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
        """Share of the shorter of the two that running together saved, from 0 to 1."""
        saved = (self.compute + self.collective - self.both) / min(self.compute, self.collective)
        return min(max(saved, 0.0), 1.0)

    @property
    def possible(self) -> bool:
        """Together they take no less than the longer and no more than both in turn; else the machine changed its speed in between."""
        return max(self.compute, self.collective) <= self.both * (1 + NOISE) and self.both <= (self.compute + self.collective) * (1 + NOISE)


def measure_overlap(place: Place, rounds: int = 7) -> tuple[Timing, Timing]:
    """Timings with an all_reduce shorter and one longer than the compute. Needs an axis of more than one rank."""
    return timing(place, "all_reduce", 0.5, rounds), timing(place, "all_reduce", 2.0, rounds)


def timing(place: Place, kind: str, share: float, rounds: int) -> Timing:
    """A matmul loop of TARGET seconds, and a collective over the longest axis that takes about `share` as long."""
    watch, axis = Stopwatch(place), max(range(place.mesh.ndim), key=lambda i: place.mesh.sizes[i])
    a = torch.randn(SIDE, SIDE, device=place.device)
    loops = max(1, int(TARGET / _agreed(watch, lambda: a @ a, 3)))
    begin, end = _collective(place, kind, axis, PROBE)
    per_byte = _agreed(watch, lambda: end(begin()), 3) / PROBE
    start, finish = _collective(place, kind, axis, int(share * TARGET / per_byte))

    def compute() -> None:
        for _ in range(loops):
            a @ a

    def both() -> None:
        pending = start()
        compute()
        finish(pending)

    return Timing(*(_agreed(watch, run, rounds) for run in (compute, lambda: finish(start()), both)))


def fitted(short: Timing, long: Timing) -> Overlap:
    """The profile's numbers from two timings. T = 30 ms; C = 15 ms, both 36 ms: interference 0.4.
    Then C = 60 ms, both 75 ms: eta = (30 + 60 - 75) / (0.6 x 30) = 0.83."""
    interference = min(max((short.both - short.compute) / short.collective, 0.0), 1.0)
    if interference > USELESS:
        return Overlap(0.0, 1.0)
    eta = (long.compute + long.collective - long.both) / ((1 - interference) * long.compute)
    return Overlap(min(max(eta, 0.0), 1.0), interference)


def _collective(place: Place, kind: str, axis: int, nbytes: int) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """(start, finish) of `kind` with a buffer of about `nbytes`, by the convention of collectives/__init__.py, as the runtime
    does it: messages where gloo carries them, else the library's collective."""
    n, tag = place.mesh.sizes[axis], place.groups[place.mesh.names[axis]]
    numel = max(nbytes // 4 // n, 1) * n
    x = torch.ones(numel // n if RUN[kind].counted == "out" else numel, device=place.device)
    rest = RUN[kind].arguments(numel, n, "sum")
    carrier = place.carriers().get(tag)
    if carrier is not None:
        begin, op = start(RUN[kind], carrier, in_place=True), RUN[kind].reduce_op(rest)
        return lambda: begin(x, op, carrier), gloo_messages.land
    return lambda: RUN[kind].target(x, *rest, tag), _torch.WAIT


def _agreed(watch: Stopwatch, run: Callable[[], Any], rounds: int) -> float:
    """Lower quartile over rounds of the slowest rank."""
    own = []
    run()
    for _ in range(rounds):
        watch.barrier()
        own.append(watch.once(run, 1))
    return float(np.percentile(watch.slowest(own), 25))
