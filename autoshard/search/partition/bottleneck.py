"""Cuts into stages that may have different numbers of devices, so that the slowest stage is as fast as possible.

    least[j, m] = min over k, n of max(least[k, m - n], cost[k, j, n])

States 1..K are points of the model where it can be cut, in an order in which each comes after those before it; state 0 is the beginning.
`cost[k, j, n - 1]` is a stage from state k to state j on n devices, infinite where k is not before j; states need not be a row, so a model
with branches can be cut too. This is the steady state of a pipeline with replicated stages; it says nothing of filling and draining.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Replicated:
    """`stages`: (first state, last state, devices) of each; `seconds` of the slowest."""

    stages: tuple[tuple[int, int, int], ...]
    seconds: float

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(n for _, _, n in self.stages)


def least_bottleneck(cost: np.ndarray) -> Replicated:
    """Uses exactly as many devices as `cost` has for one stage. Of equal ones, the last stage that begins earliest and has fewest devices."""
    states, devices = cost.shape[1], cost.shape[2]
    least = np.full((states, devices + 1), np.inf)
    least[0, 0] = 0.0
    came_from = np.zeros((states, devices + 1, 2), dtype=np.int64)
    for m in range(1, devices + 1):
        before = least[:, m - np.arange(1, m + 1), None]  # [k, n - 1, 1]
        through = np.maximum(before, cost.transpose(0, 2, 1)[:, :m]).reshape(states * m, states)
        first = through.argmin(0)
        least[:, m] = through[first, np.arange(states)]
        came_from[:, m] = np.stack([first // m, first % m + 1], 1)
    return Replicated(_stages(came_from, states - 1, devices), float(least[-1, devices]))


def _stages(came_from: np.ndarray, state: int, devices: int) -> tuple[tuple[int, int, int], ...]:
    stages = []
    while state:
        first, n = came_from[state, devices].tolist()
        stages.append((first, state, n))
        state, devices = first, devices - n
    return tuple(reversed(stages))
