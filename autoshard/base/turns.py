"""What one rank of a pipeline does in a step, in order, as far as its runner and its memory go: it posts receives, runs windows, and sends.

An action of a schedule is one or several turns: a whole backward runs two windows, and every value that crosses stages is a turn of its own."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autoshard.base.plan import Window

UNDER_WAY = 2
"""Values of one channel (a receiver and a window) that are held as sent at once; the oldest is waited for before a further one is sent. Only
between neighbours: there the schedule allows for sends that block. What skips stages is held until the step ends."""
HERE = -1


@dataclass(frozen=True, slots=True)
class Turn:
    """post: begin to receive `value` from rank `other`; run: compute a window, which takes the values `takes`; send: hand `value` to rank
    `other`, or to a stage on this rank (HERE). Values are names of hops between stages; it `skips` if other stages lie between."""

    kind: Literal["post", "run", "send"]
    stage: int
    window: Window
    microbatch: int
    value: str = ""
    other: int = HERE
    takes: tuple[str, ...] = ()
    skips: bool = False


@dataclass(frozen=True)
class Duty:
    """What the rank of a stage does in a step; other stages on that rank have turns in it too. `inputs`: bytes that the user holds there of inputs
    which the stage does not read; `shared`: bytes once a step, at its end, for what stages share (parts of gradients of tied weights, results)."""

    stage: int
    turns: tuple[Turn, ...]
    inputs: int = 0
    shared: int = 0
