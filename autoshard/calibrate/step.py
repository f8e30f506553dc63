"""What a training step takes besides its ops, its collectives and the optimizer's update, where the host is the device: reading the inputs,
autograd, handing out gradients, zero_grad.

Two stacks of layers are compiled and trained in turn, a step of one and a step of the other, with every call clocked, as `autoshard.clocked` does it.
What is left of a step are the gaps between its calls. Each gap is timed by itself, over all steps: a pause of the machine falls into one gap of one
step, and is left out there. The sum of the gaps grows with the parameters:

    left = step + parameters x per_parameter
"""
from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import torch
from torch import nn

from autoshard.calibrate.measure import Progress, Stopwatch, trimmed_mean
from autoshard.calibrate.sample import Sample
from autoshard.runtime.ranks.place import Place
from autoshard.simulation.clocked import Moment

LAYERS = (6, 24)
WIDTH, ROWS = 256, 512
"""Of a layer: a product of half a millisecond, which leaves little of Python's own data in the caches, as in a model."""
STEPS = 30
WARM = 3


class Steps:
    """Steps of the two stacks, which may be taken between other things. All ranks do the same."""

    def __init__(self, place: Place) -> None:
        self.watch = Stopwatch(place)
        self.stacks = [Trained(place, layers, self.watch) for layers in LAYERS]
        for stack in self.stacks:
            for _ in range(WARM):
                stack.gaps()

    def go(self, steps: int) -> None:
        """So many more steps of each."""
        for _ in range(steps):
            for stack in self.stacks:
                stack.table.append(stack.gaps())

    def samples(self) -> list[Sample]:
        """Seconds that are left of a step, per number of parameters, by the steps so far."""
        left = self.watch.slowest([float(trimmed_mean(np.array(stack.table)).sum()) for stack in self.stacks])
        return [Sample("step", "step", float(layers), seconds, False, dtype="float32") for layers, seconds in zip(LAYERS, left, strict=True)]


def steps_of(place: Place, progress: Progress) -> Steps | None:
    """On a CPU; other devices work while their host does this."""
    if place.device.type != "cpu":
        return None
    progress("calibrate", "a step besides its ops")
    return Steps(place)


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


class Trained:
    """A stack under its plan, and the gaps of its steps so far. `table[i]`: those of step i, in order."""

    def __init__(self, place: Place, layers: int, watch: Stopwatch) -> None:
        import autoshard

        torch.manual_seed(0)
        self.watch, self.table = watch, list[list[float]]()
        self.x = torch.randn(ROWS * place.mesh.size, WIDTH)
        self.compiled = autoshard.compile(Stack(layers), str(place.mesh), (self.x,), cluster="cpu-gloo", cache=False, check_inputs="never",
                                          time_limit=5.0)
        self.optimizer = autoshard.local_update(torch.optim.AdamW(self.compiled.parameters(), lr=0.0))
        self._clocked = ExitStack()  # left open: the stack is for nothing else, and freshly bound code is slower
        self.clock = self._clocked.enter_context(autoshard.clocked(self.compiled))

    def gaps(self) -> list[float]:
        """Of one more step."""
        self.clock.moments.clear()
        self.watch.barrier()
        start = time.perf_counter()
        self.optimizer.zero_grad()
        self.compiled(self.x).backward()
        with self.clock.span("update"):
            self.optimizer.step()
        return between(self.clock.moments, start, time.perf_counter())


def between(moments: Sequence[Moment], start: float, end: float) -> list[float]:
    """Seconds from `start` to the first moment, from the end of each to the next one, and from the last to `end`."""
    return [b - a for a, b in zip((start, *(m.end for m in moments)), (*(m.begin for m in moments), end), strict=True)]
