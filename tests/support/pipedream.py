"""PipeDream's model of a stage, as prices for `least_bottleneck`.

The profiles are those of github.com/msr-fiddle/pipedream (MIT License, Copyright (c) 2015 - present Microsoft Corporation; profiler/), reduced to the states
at which its optimizer cuts: cumulative milliseconds of forward and backward, cumulative bytes of parameters, bytes of the activations that leave
a state, and the states right before it, where these are no row.
"""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np

PROFILES = json.loads((Path(__file__).parent.parent / "search" / "partition" / "pipedream_profiles.json").read_text())
BANDWIDTH = 1.25e9


def stage_costs(model: str, machines: int, transfers: bool, larger: bool = False) -> np.ndarray:
    """[k, j, m - 1]: (compute + 4 (m-1) P / (m bw)) / m seconds, or with `transfers` at least 2 A / (m bw) of what comes in or goes out.
    The program divides the sum by m where the paper takes the larger of the two (`larger`), and a first stage pays nothing for what goes out."""
    profile = PROFILES[model]
    seconds, parameters = (np.concatenate([[0.0], profile[key]]) for key in ("milliseconds", "parameter_bytes"))
    m = np.arange(1, machines + 1)
    compute = (seconds[None] - seconds[:, None])[:, :, None] / 1e3
    bytes_ = (parameters[None] - parameters[:, None])[:, :, None]
    cost = (np.maximum if larger else np.add)(compute, 4 * (m - 1) * bytes_ / (BANDWIDTH * m)) / m
    if transfers:
        out = np.array([0.0, *profile["activation_bytes"]])[:, None] * 2.0 / (BANDWIDTH * m)
        leaving = out.copy()
        leaving[-1] = 0.0
        cost[1:] = np.maximum(np.maximum(cost[1:], out[1:, None]), leaving[None])
    return np.where(_before(profile)[:, :, None], cost, np.inf)


def seconds_alone(model: str) -> float:
    return PROFILES[model]["milliseconds"][-1] / 1e3


def _before(profile: dict) -> np.ndarray:
    """[k, j]: whether state k comes before state j; state 0 is the beginning."""
    states = len(profile["milliseconds"])
    parents = profile.get("parents", [[]] + list(range(states - 1)))
    before = np.zeros((states + 1, states + 1), dtype=bool)
    before[0, 1:] = True
    for state, direct in enumerate(parents, start=1):
        for parent in direct if isinstance(direct, list) else [direct]:
            before[parent + 1, state] = True
            before[:, state] |= before[:, parent + 1]
    return before
