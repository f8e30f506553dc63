"""What every rank does, told to the others through the store: nobody waits for a rank that is gone or went elsewhere.

Each rank writes a beat, a number that grows with what it does, once a second from a thread of its own. A rank that
waits reads the beats of the one it waits for: no new beat for `LOST` seconds is a dead process, and a rank that
runs (or is past) a call which others still prepare took another way through the program.
"""
from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("autoshard")
BEAT = 1.0
LOST = 60.0
"""Seconds. Long: a search may keep Python from switching threads for a while."""


@dataclass(frozen=True)
class Beat:
    """`call`: how many calls of this model were entered; `agreeing`: whether the rank prepares that call with the others."""

    count: int
    call: int
    agreeing: bool
    what: str

    @staticmethod
    def read(text: str) -> "Beat":
        count, call, agreeing, what = text.split(" ", 3)
        return Beat(int(count), int(call), agreeing == "1", what)


class Pulse:
    """Of one rank and one model. `told` is what the thread writes: [calls entered, whether it prepares the last of
    them with the others, what it does]; changing it is cheap enough for every call."""

    def __init__(self, store: Any, prefix: str, rank: int) -> None:
        self.store, self.prefix = store, prefix
        self.told: list[Any] = [0, False, "it has not called the model yet"]
        self._heard: dict[int, tuple[int, float]] = {}
        store.set(f"{prefix}/{rank}", f"0 0 0 {self.told[2]}")  # now: a rank killed before its thread runs was there
        quiet = threading.Event()
        thread = threading.Thread(target=_beat, args=(store.clone(), f"{prefix}/{rank}", self.told, quiet), daemon=True,
                                  name="autoshard-pulse")
        thread.start()
        self._end = weakref.finalize(self, _stop, quiet, thread)  # at exit too: a thread inside the store then would abort

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A call is entered that all ranks prepare together."""
        self.told[:] = [self.told[0] + 1, True, what]
        try:
            yield
        except BaseException as e:
            self.told[1:] = [False, f"it failed there ({type(e).__name__})"]
            raise
        self.told[1:] = [False, f"it runs {what}, which it has prepared before"]

    def trouble(self, rank: int) -> str:
        """Why waiting for `rank` is in vain, or ""."""
        key = f"{self.prefix}/{rank}"
        if not self.store.check([key]):
            return ""
        beat, now = Beat.read(self.store.get(key).decode()), time.monotonic()
        count, since = self._heard.get(rank, (-1, now))
        if beat.count != count:
            self._heard[rank] = beat.count, now
        elif now - since > LOST:
            return f"rank {rank} has not been heard of for {now - since:.0f} s: its process was killed or hangs; see its output"
        call, agreeing, what = self.told
        if agreeing and not beat.agreeing and beat.call >= call:
            return (f"rank {rank} does not prepare call {call} with the others: {beat.what}, and this rank has {what}; every rank "
                    "must call the same model in the same mode with inputs of the same shapes and dtypes")
        return ""


def _beat(store: Any, key: str, told: list[Any], quiet: threading.Event) -> None:
    count = 0
    while True:
        call, agreeing, what = told
        count += 1
        try:
            store.set(key, f"{count} {call} {int(agreeing)} {what}")
        except RuntimeError as e:  # the store is gone, and with it whoever could read this
            log.debug("no more beats: %s", e)
            return
        if quiet.wait(BEAT):
            return


def _stop(quiet: threading.Event, thread: threading.Thread) -> None:
    quiet.set()
    if thread is not threading.current_thread():
        thread.join(5.0)
