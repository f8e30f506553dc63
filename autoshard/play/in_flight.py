"""Bytes of a rank beside the micro-batch that it computes: other micro-batches between their windows, receives that are posted, and what
is held until it is sent. Counted from the turns of the rank, one after the other.

One micro-batch of a stage is played to the byte (`play.py`); all are alike, and they share no buffer but those that the whole step has. So what
a rank holds is a sum: what the step has, the micro-batch at work as it was played, and for every other one what it keeps behind the
window that it ran last.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoshard.base.plan import CATEGORIES, Window
from autoshard.base.turns import HERE, UNDER_WAY, Turn

TEMPORARIES, SAVED = CATEGORIES.index("temporaries"), CATEGORIES.index("saved")
Bytes = np.ndarray
"""Per category of `CATEGORIES`."""


@dataclass(frozen=True, eq=False)
class Keeping:
    """What one micro-batch of a stage keeps. `behind`: bytes between a window and the next one of the same micro-batch; `arriving`: of a value
    that it receives; `leaving`: of a value that it sends, by the window behind which the micro-batch is: 0 where it keeps that buffer anyway;
    `holding`: windows behind which it keeps a value that it received."""

    behind: Mapping[Window, Bytes]
    arriving: Mapping[str, int]
    leaving: Mapping[str, Mapping[Window, int]]
    holding: Mapping[str, frozenset[Window]] = field(default_factory=dict)


@dataclass(eq=False)
class _Held:
    """The state of a rank on its way through its turns."""

    stages: Mapping[int, Keeping]
    between: dict[tuple[int, int], Window] = field(default_factory=dict)
    posted: dict[tuple[str, int], int] = field(default_factory=dict)
    sent: dict[tuple[int, Window, bool], deque[tuple[int, int, str]]] = field(default_factory=dict)
    here: dict[tuple[str, int], tuple[int, int, str]] = field(default_factory=dict)
    kept: Bytes = field(default_factory=lambda: np.zeros(len(CATEGORIES)))
    passed: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    """Values that went from a stage to another one on this rank, in one buffer."""
    working: tuple[int, int, Window] = (-1, -1, "")

    def total(self) -> Bytes:
        out = self.kept.copy()
        out[TEMPORARIES] += sum(self.posted.values())
        for entries in (*self.sent.values(), self.here.values()):
            out[TEMPORARIES] += sum(self._leaving(*entry) for entry in entries)
        out[SAVED] -= sum(self.stages[source].leaving[value][""] for (value, m), (source, target) in self.passed.items()
                          if self._both_keep(value, m, source, target))
        return out

    def _both_keep(self, value: str, m: int, source: int, target: int) -> bool:
        """Each of the two stages counts the buffer, behind its last window or, if it is at work, all through its window."""
        sender, receiver = self._window_of(source, m), self._window_of(target, m)
        return sender != "" and self.stages[source].leaving[value][sender] == 0 and receiver in self._holds(value, target)

    def _holds(self, value: str, stage: int) -> frozenset[Window]:
        return self.stages[stage].holding.get(value, frozenset())

    def _window_of(self, stage: int, m: int) -> Window:
        return self.working[2] if self.working[:2] == (stage, m) else self.between.get((stage, m), "")

    def _leaving(self, stage: int, m: int, value: str) -> int:
        return self.stages[stage].leaving[value][self.between.get((stage, m), "")]

    def begin(self, stage: int, m: int, window: Window) -> None:
        """The micro-batch is at work: what it kept is part of what was played."""
        self.working = stage, m, window
        before = self.between.pop((stage, m), None)
        if before is not None:
            self.kept -= self.stages[stage].behind[before]

    def end(self, stage: int, m: int, window: Window) -> None:
        self.between[stage, m], self.working = window, (-1, -1, "")
        done = [key for key, (_, target) in self.passed.items() if key[1] == m and target == stage and window not in self._holds(key[0], stage)]
        for key in done:
            del self.passed[key]
        self.kept += self.stages[stage].behind[window]


def beside(turns: Sequence[Turn], stages: Mapping[int, Keeping]) -> dict[tuple[int, Window], Bytes]:
    """Per stage and window, the most bytes that the rank holds beside the micro-batch at work there. Stages that are not in `stages` hold nothing."""
    held, found = _Held(stages), dict[tuple[int, Window], Bytes]()
    for turn in turns:
        own, m = turn.stage in stages, turn.microbatch
        if turn.kind == "post" and own:
            held.posted[turn.value, m] = stages[turn.stage].arriving[turn.value]
        elif turn.kind == "send" and own:
            _send(held, turn)
        elif turn.kind == "run":
            for value in turn.takes:
                held.posted.pop((value, m), None)
                if (entry := held.here.pop((value, m), None)) is not None and own:
                    held.passed[value, m] = entry[0], turn.stage
            if own and turn.window in stages[turn.stage].behind:
                held.begin(turn.stage, m, turn.window)
                now = held.total()
                key = turn.stage, turn.window
                if key not in found or now.sum() > found[key].sum():
                    found[key] = now
                held.end(turn.stage, m, turn.window)
    return found


def _send(held: _Held, turn: Turn) -> None:
    entry = turn.stage, turn.microbatch, turn.value
    if turn.other == HERE:
        held.here[turn.value, turn.microbatch] = entry
        return
    channel = held.sent.setdefault((turn.other, turn.window, turn.skips), deque())
    while not turn.skips and len(channel) >= UNDER_WAY:
        channel.popleft()
    channel.append(entry)
