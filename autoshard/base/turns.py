"""What one rank of a pipeline does in a step, in order, as far as its runner and its memory go: it posts receives, runs windows, and sends.

An action of a schedule is one or several turns: a whole backward runs two windows, and every value that crosses stages is a turn of its own."""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
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

    @cached_property
    def fullest(self) -> tuple[int, int]:
        """When a forward of the stage ends with most micro-batches in flight: how many these are, and how many of them have run a part of their
        backward already. Of such moments, one with fewest of the latter."""
        mine = [turn for turn in self.turns if turn.kind == "run" and turn.stage == self.stage]
        left = Counter(turn.microbatch for turn in mine)
        windows, found = max(left.values(), default=1), [(1, 0)]
        now: dict[int, int] = {}
        for turn in mine:
            now[turn.microbatch] = now.get(turn.microbatch, 0) + 1
            if now[turn.microbatch] == windows:
                del now[turn.microbatch]
            elif now[turn.microbatch] == 1:
                found.append((len(now), -sum(done > 1 for done in now.values())))
        most, late = max(found)
        return most, -late
