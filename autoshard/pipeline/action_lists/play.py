"""Plays a network of actions: when each begins and ends, how long ranks are busy and idle, and how many micro-batches they hold.

A rank does its actions in order, each as soon as what it reads is there. A transfer occupies its wire, not the ranks.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.pipeline.action_lists.actions import COMPUTE, KINDS, ActionTable
from autoshard.pipeline.action_lists.network import NOTHING, NUMBER, Network
from autoshard.search.dual.jit import compiled


@dataclass(frozen=True, eq=False)
class Seconds:
    """`of[kind, stage]`: what an action lasts, kinds as in `KINDS`. A send is the whole transfer; a receive costs nothing."""

    of: np.ndarray

    @staticmethod
    def per_stage(stages: int, **seconds: float | Sequence[float] | np.ndarray) -> Seconds:
        """One value per stage, or one for all, by kind; kinds that are not given last no time."""
        of = np.zeros((len(KINDS), stages))
        for kind, value in seconds.items():
            of[NUMBER[kind]] = value
        return Seconds(of)


@dataclass(frozen=True, eq=False)
class Playback:
    """When each event of `network` begins and ends, in seconds from the begin of the step."""

    network: Network
    start: np.ndarray
    end: np.ndarray

    @property
    def makespan(self) -> float:
        return float(self.end.max(initial=0.0))

    @cached_property
    def busy(self) -> np.ndarray:
        """Seconds that each rank computes."""
        on_rank = self.network.place != NOTHING
        return np.bincount(self.network.place[on_rank], (self.end - self.start)[on_rank], len(self.network.table.ranks))

    @property
    def idle(self) -> np.ndarray:
        return self.makespan - self.busy

    @property
    def bubble(self) -> float:
        """What the step lasts longer than its busiest rank computes, as a share of the latter."""
        most = float(self.busy.max())
        return (self.makespan - most) / most if most else 0.0

    @cached_property
    def waits(self) -> np.ndarray:
        """Seconds that each rank is idle between its first action and its last one: what is lost in every one of many steps in a row, where
        a rank may begin the next step without waiting for the others."""
        ranks = range(len(self.network.table.ranks))
        mine = [self.network.place == rank for rank in ranks]
        return np.array([self.end[m].max() - self.start[m].min() if m.any() else 0.0 for m in mine]) - self.busy


def play(network: Network, seconds: Seconds) -> Playback:
    end = np.zeros(len(network.events))
    start = np.zeros(len(network.events))
    _play(network.before, network.source, seconds.of.ravel()[network.price], start, end)
    return Playback(network, start, end)


def makespans(network: Network, seconds: np.ndarray) -> np.ndarray:
    """Of many cases at once: `seconds[case, kind, stage]`."""
    flat = np.ascontiguousarray(seconds.reshape(len(seconds), math.prod(seconds.shape[1:])), dtype=np.float64)
    out = np.zeros(len(flat))
    _makespans(network.before, network.source, network.price, flat, out)
    return out


@compiled
def _play(before: np.ndarray, source: np.ndarray, seconds: np.ndarray, start: np.ndarray, end: np.ndarray) -> None:
    for event in range(len(seconds)):
        begin = 0.0
        if before[event] >= 0:
            begin = end[before[event]]
        if source[event] >= 0:
            begin = max(begin, end[source[event]])
        start[event] = begin
        end[event] = begin + seconds[event]


@compiled
def _makespans(before: np.ndarray, source: np.ndarray, price: np.ndarray, seconds: np.ndarray, out: np.ndarray) -> None:
    end = np.zeros(len(price))
    for case in range(len(seconds)):
        for event in range(len(price)):
            begin = 0.0
            if before[event] >= 0:
                begin = end[before[event]]
            if source[event] >= 0:
                begin = max(begin, end[source[event]])
            end[event] = begin + seconds[case, price[event]]
            out[case] = max(out[case], end[event])


def held(table: ActionTable, saved: Sequence[float] | np.ndarray, between: Sequence[float] | np.ndarray | None = None) -> np.ndarray:
    """The most that each rank holds at once: `saved[s]` of a micro-batch from F of stage s to the end of B or I, and `between[s]`, by
    default as much, from I to the end of W. It is counted from the list: the order says it, whatever the seconds are."""
    between = saved if between is None else between
    gains = {"F": lambda s: saved[s], "B": lambda s: -saved[s], "I": lambda s: between[s] - saved[s], "W": lambda s: -between[s]}
    return np.array([_highest([gains[a.kind](a.stage) for a in actions if a.kind in COMPUTE]) for actions in table.ranks])


def _highest(gains: list[float]) -> float:
    return float(np.cumsum(gains).max(initial=0.0))
