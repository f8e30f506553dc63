"""What a training step takes besides its ops, its collectives and the optimizer's update, where the host is the device: reading the inputs,
autograd, handing out gradients, zero_grad.

Two stacks of layers are compiled and trained for some steps with every call clocked, as `autoshard.clocked` does it. What is left of a step
grows with its parameters:

    left = step + parameters x per_parameter
"""
from __future__ import annotations

import time

import numpy as np
import torch
from torch import nn

from autoshard.calibrate.measure import Progress, Stopwatch
from autoshard.calibrate.sample import Sample
from autoshard.runtime.ranks.place import Place
from autoshard.simulation.clocked import Clock

LAYERS = (6, 24)
WIDTH, ROWS = 256, 512
"""Of a layer: a product of half a millisecond, which leaves little of Python's own data in the caches, as in a model."""
STEPS = 30
WARM = 3


def step_samples(place: Place, progress: Progress) -> list[Sample]:
    """Seconds that are left of a step, per number of parameters; on a CPU, where no device works meanwhile."""
    if place.device.type != "cpu":
        return []
    progress("calibrate", "a step besides its ops")
    watch = Stopwatch(place)
    return [Sample("step", "step", float(layers), watch.slowest([_left(place, layers, watch)])[0], False, dtype="float32") for layers in LAYERS]


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def _left(place: Place, layers: int, watch: Stopwatch) -> float:
    import autoshard

    torch.manual_seed(0)
    x = torch.randn(ROWS * place.mesh.size, WIDTH)
    compiled = autoshard.compile(Stack(layers), str(place.mesh), (x,), cluster="cpu-gloo", cache=False, check_inputs="never", time_limit=5.0)
    optimizer = autoshard.local_update(torch.optim.AdamW(compiled.parameters(), lr=0.0))

    def step() -> None:
        optimizer.zero_grad()
        compiled(x).backward()

    def left(clock: Clock) -> float:
        clock.moments.clear()
        watch.barrier()
        start = time.perf_counter()
        step()
        with clock.span("update"):
            optimizer.step()
        return time.perf_counter() - start - sum(m.end - m.begin for m in clock.moments)

    for _ in range(WARM):
        step()
        optimizer.step()
    with autoshard.clocked(compiled) as clock:
        return float(np.percentile([left(clock) for _ in range(STEPS)][WARM:], 25))  # a pause in any of its hundreds of calls only adds
