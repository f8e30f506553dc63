"""Copy nodes of the search problem: their states, and the tables between them, the producer and the readers.

A value that several consumers read in one spec is redistributed once. The node of that redistribution has the states

    absent     nobody reads the value in this spec
    own        the producer made it in this spec
    made       redistributed in every window that it serves
    kept       redistributed in a window and kept until a later one

Of values that one window reads only, there is one `made` state; where several do, there is a state for every set of windows,
and for each of them whether it is made there or kept from an earlier one. Seconds that may hide behind compute sit on the states,
so there is one such state per distinct price.
"""
from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np

from autoshard.base.graph import Ref
from autoshard.base.spec import Spec
from autoshard.space.strategies import SpecIndex

ABSENT, OWN, MADE, KEPT = "absent", "own", "made", "kept"


@dataclass(frozen=True)
class State:
    """One state of a copy node. Per window of the step: whether readers there find the value (`serves`), and how often the
    redistribution runs there (`times`). `price`: its seconds where the state fixes them (overlap), else None and the producer
    edge carries them."""

    name: str
    serves: tuple[bool, ...]
    times: tuple[int, ...]
    price: float | None = None

    def count(self, runs: Sequence[int]) -> int:
        """How often a step makes the copy where it runs its windows so often."""
        return sum(t * n for t, n in zip(self.times, runs, strict=True))

    def outlives(self, window: int) -> bool:
        """Whether a copy made in `window`, or before, is kept for a later one."""
        after = next((w for w in range(window + 1, len(self.serves)) if self.serves[w]), None)
        return self.name == KEPT and any(self.times[:window + 1]) and after is not None and not self.times[after]


def absent(windows: int) -> State:
    return State(ABSENT, (False,) * windows, (0,) * windows)


def own(windows: int, until: int | None = None) -> State:
    """The producer's. `until`: only in the windows before that one."""
    return State(OWN, tuple(until is None or w < until for w in range(windows)), (0,) * windows)


@cache
def made(windows: int, readers: frozenset[int]) -> tuple[State, ...]:
    """The ways to have a value in the windows that read it, those that serve fewer first."""
    if len(readers) == 1:
        return (State(MADE, (True,) * windows, tuple(int(w in readers) for w in range(windows))),)
    out = []
    for how in product((None, MADE, KEPT), repeat=len(readers)):
        first = next((i for i, h in enumerate(how) if h is not None), None)
        if first is None or how[first] == KEPT:
            continue  # nothing is made, or nothing was made before
        at = dict(zip(sorted(readers), how, strict=True))
        state = State(KEPT if KEPT in how else MADE, tuple(at.get(w) is not None for w in range(windows)),
                      tuple(int(at.get(w) == MADE) for w in range(windows)))
        out.append(((sum(state.serves), how.count(KEPT), first), state))
    return tuple(state for _, state in sorted(out, key=lambda x: x[0]))


@dataclass(frozen=True)
class CopyNode:
    """Copy node of `value` in `spec`; `states[s]` is its strategy s. `readers` = (op, input index)."""

    value: Ref
    spec: Spec
    states: tuple[State, ...]
    readers: tuple[tuple[str, int], ...]


def copy_states(src: SpecIndex, spec: Spec, prices: np.ndarray, readers: Collection[int], windows: int, priced: bool,
                source: int | None) -> tuple[State, ...]:
    """States of the copy in `spec` of a value made in the specs `src`, at `prices` (seconds from each), which the windows
    `readers` of `windows` read. `priced`: the prices sit on the states; `source`: the window that reads the value through its
    source, if one does."""
    possible = sorted({float(p) for s, p in zip(src.specs, prices, strict=True) if s != spec and np.isfinite(p)})
    plain = made(windows, frozenset(readers))
    moved = [replace(s, price=p) for s in plain for p in possible] if priced else list(plain)
    owned = ([own(windows, until=source)] if source is not None and len(readers) > 1 else []) + [own(windows)]
    return (absent(windows), *(owned if spec in src.specs else []), *(moved if possible else []))


def producer_table(src: SpecIndex, spec: Spec, prices: np.ndarray, states: tuple[State, ...], runs: Sequence[int]) -> np.ndarray:
    """[producer specs, states]: inf where the state contradicts the producer's spec; else edge seconds. `runs`: of each window in a step."""
    out = np.zeros((len(src.specs), len(states)))
    same = np.array([source == spec for source in src.specs])
    moves = ~same & np.isfinite(prices)
    for s, state in enumerate(states):
        if state.name == OWN:
            out[:, s] = np.where(same, 0.0, np.inf)
        elif state.name != ABSENT:
            fits = moves if state.price is None else moves & (prices == state.price)
            out[:, s] = np.where(fits, 0.0 if state.price is not None else prices * state.count(runs), np.inf)
    return out


def with_source(producer: np.ndarray, prices: np.ndarray, states: Sequence[State], window: int) -> np.ndarray:
    """[producer specs x state of the source, states]. From `window` on a copy is made from the recompute source, which may be
    off. A copy of an earlier window may be kept only if the value is not recomputed, and if it is no slice of it, which is free at `prices`: a slice
    keeps the whole value alive, so the source keeps that, and `window` slices again."""
    kept = np.array([s.outlives(window - 1) for s in states])
    producer = np.where(kept & (prices == 0.0)[:, None], np.inf, producer)
    needs = np.array([s.name == OWN and s.serves[window] or any(s.times[window:]) for s in states])
    barred = np.stack([np.where(needs, np.inf, 0.0), np.zeros(len(states)), np.where(kept, np.inf, 0.0)])
    return (producer[:, None, :] + barred[None]).reshape(-1, len(states))


def reader_table(dst: SpecIndex, spec: Spec, states: Sequence[State], window: int) -> np.ndarray:
    """[states, consumer specs]: inf where the consumer reads `spec` and the state does not serve its window."""
    out = np.zeros((len(states), len(dst.specs)))
    if spec in dst.specs:
        out[[not s.serves[window] for s in states], dst.specs.index(spec)] = np.inf
    return out
