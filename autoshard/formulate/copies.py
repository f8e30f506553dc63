"""Copy nodes of the search problem: their states, and the tables between them, the producer and the readers.

A value that several consumers read in one spec is redistributed once. The node of that redistribution has the states

    absent         nobody reads the value in this spec
    own            the producer made it in this spec
    made           redistributed for the one window (forward or backward) that reads it
    forward / backward / both   redistributed in that window, or once in each
    kept           redistributed in forward and kept until backward

Seconds that may hide behind compute sit on the states, so there is one `made` state per distinct price.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoshard.base.graph import Ref
from autoshard.base.plan import Window
from autoshard.base.spec import Spec
from autoshard.space.strategies import SpecIndex

Serves = tuple[bool, bool]  # readable in the forward window, in the backward window


@dataclass(frozen=True)
class State:
    """One state of a copy node. `times`: how often the redistribution runs; `price`: its seconds where the
    state fixes them (overlap), else None and the producer edge carries them."""

    name: str
    serves: Serves
    times: tuple[int, int]
    price: float | None = None


ABSENT = State("absent", (False, False), (0, 0))
OWN = State("own", (True, True), (0, 0))
MADE = {"forward": State("made", (True, True), (1, 0)), "backward": State("made", (True, True), (0, 1))}
OWN_FORWARD = State("own", (True, False), (0, 0))
BOTH_WINDOWS = (State("forward", (True, False), (1, 0)), State("backward", (False, True), (0, 1)),
                State("both", (True, True), (1, 1)), State("kept", (True, True), (1, 0)))


@dataclass(frozen=True)
class CopyNode:
    """Copy node of `value` in `spec`; `states[s]` is its strategy s. `readers` = (op, input index)."""

    value: Ref
    spec: Spec
    states: tuple[State, ...]
    readers: tuple[tuple[str, int], ...]


def copy_states(src: SpecIndex, spec: Spec, prices: np.ndarray, windows: set[Window], priced: bool,
                in_source: bool) -> tuple[State, ...]:
    """States of the copy in `spec` of a value made in the specs `src`, at `prices` (seconds from each). `priced`: they sit on
    the states; `in_source`: backward reads the value through its source."""
    possible = sorted({float(p) for s, p in zip(src.specs, prices, strict=True) if s != spec and np.isfinite(p)})
    plain = BOTH_WINDOWS if len(windows) == 2 else (MADE[next(iter(windows))],)
    made = [State(s.name, s.serves, s.times, p) for s in plain for p in possible] if priced else list(plain)
    own = ([OWN_FORWARD] if in_source and len(windows) == 2 else []) + [OWN]
    return (ABSENT, *(own if spec in src.specs else []), *(made if possible else []))


def producer_table(src: SpecIndex, spec: Spec, prices: np.ndarray, states: tuple[State, ...]) -> np.ndarray:
    """[producer specs, states]: inf where the state contradicts the producer's spec; else edge seconds."""
    out = np.zeros((len(src.specs), len(states)))
    for p, (source, price) in enumerate(zip(src.specs, prices, strict=True)):
        for s, state in enumerate(states):
            if state.name == "own":
                out[p, s] = 0.0 if source == spec else np.inf
            elif state is not ABSENT:
                fits = source != spec and np.isfinite(price) and (state.price is None or state.price == price)
                out[p, s] = np.inf if not fits else 0.0 if state.price is not None else price * sum(state.times)
    return out


def with_source(producer: np.ndarray, states: tuple[State, ...]) -> np.ndarray:
    """[producer specs x state of the source, states]: what serves backward is the source's, which may be off; copies of
    forward are kept of what does not run again."""
    kept = np.array([s.name == "kept" for s in states])
    needs = np.array([s.serves[1] and s is not ABSENT for s in states]) & ~kept
    barred = np.stack([np.where(needs, np.inf, 0.0), np.zeros(len(states)), np.where(kept, np.inf, 0.0)])
    return (producer[:, None, :] + barred[None]).reshape(-1, len(states))


def reader_table(dst: SpecIndex, spec: Spec, states: tuple[State, ...], backward: bool) -> np.ndarray:
    """[states, consumer specs]: inf where the consumer reads `spec` and the state does not serve its window."""
    out = np.zeros((len(states), len(dst.specs)))
    if spec in dst.specs:
        out[[not s.serves[backward] for s in states], dst.specs.index(spec)] = np.inf
    return out
