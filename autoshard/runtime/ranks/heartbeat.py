"""Every rank reports through the store what it does, so that no rank waits for one that has ended or takes another branch.

Each rank writes a beat, a number that grows with what it does, once a second from a thread of its own. A rank that
waits reads the beats of the one it waits for: no new beat for `LOST` seconds is a dead process, and a rank that
runs (or is past) a call which others still prepare took another way through the program. The end of a process on this machine
is noticed within a second.
"""
from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from autoshard.errors import AutoshardError, CollectiveError
from autoshard.runtime.ranks.process import ENDED, fate, here
from autoshard.runtime.ranks.store import PatientStore

log = logging.getLogger("autoshard")
BEAT = 1.0
LOST = 60.0
"""Seconds. Long: a search may keep Python from switching threads for a while."""
JOIN = 600.0
"""Seconds that ranks wait for those that have not called `compile`."""
LOOK = 0.05
CERTAIN = 3.0
"""Seconds to look for the cause of a connection that broke: the kernel closes it before the process has ended."""
STOP = 60.0
"""Seconds that an exit waits for the thread, which needs a core for a moment; many processes may share one."""


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
    them with the others, what it does]; changing it is cheap enough for every call. `ranks`: all of the mesh."""

    def __init__(self, store: PatientStore, prefix: str, rank: int, ranks: Sequence[int], join_timeout: float = JOIN) -> None:
        self.store, self.prefix, self.rank, self.ranks, self.join_timeout, self._left = store, prefix, rank, ranks, join_timeout, ""
        self._processes: dict[int, str] = {}
        self.told: list[Any] = [0, False, "it has not called the model yet"]
        self._heard: dict[int, tuple[int, float]] = {}
        store.set(f"{prefix}/process/{rank}", here())
        store.set(f"{prefix}/{rank}", f"0 0 0 {self.told[2]}")  # now: a rank killed before its thread runs was there
        quiet = threading.Event()
        thread = threading.Thread(target=_beat, args=(store.raw.clone(), f"{prefix}/{rank}", self.told, quiet), daemon=True,
                                  name="autoshard-pulse")
        thread.start()
        self._end = weakref.finalize(self, _stop, quiet, thread, store)  # at exit too: a thread inside the store then would abort

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A call is entered that all ranks prepare together."""
        self.told[:] = [self.told[0] + 1, True, what]
        self._leave("")
        try:
            yield
        except BaseException as e:
            self.told[1:] = [False, f"it failed there ({type(e).__name__})"]
            self._leave(f"could not go on with call {self.told[0]} ({what})")
            if isinstance(e, CollectiveError):
                self._blame_gone(e)
            raise
        self.told[1:] = [False, f"it runs {what}, which it has prepared before"]

    def _leave(self, why: str) -> None:
        """Say why this rank goes on no further, or ("") that it does: others may wait for it in a collective until its process ends."""
        if why == self._left:
            return
        try:
            self.store.set(f"{self.prefix}/left/{self.rank}", why)
            self._left = why
        except AutoshardError as e:
            log.debug("nobody is told: %s", e)

    def _who_left(self) -> dict[int, str]:
        """Which ranks said that they go on no further, and why."""
        try:
            said = {r: self.store.get(f"{self.prefix}/left/{r}").decode() for r in self.ranks if self.store.check([f"{self.prefix}/left/{r}"])}
        except AutoshardError as e:  # the store is gone
            log.debug("nobody can be asked: %s", e)
            return {}
        return {r: why for r, why in said.items() if why}

    def blame(self, e: Exception) -> None:
        """Where a call failed with `e` because a rank does not come: raises an error that says which one and why, if that rank told, or its
        process is known to be gone. A rank whose process is gone without a word comes first: those that told may have waited for it."""
        left = self._who_left()
        silent = self._gone_now(left) if left else ""
        if silent:
            raise CollectiveError(f"{e}: {silent}; see its output") from e
        if left:
            told = "; ".join(f"rank {r} {why}" for r, why in left.items())
            raise AutoshardError(f"{told}: the others ran a variant of the model that they had. Every rank must call the model with inputs of "
                                 "the same shapes and dtypes, the last batch too") from e
        if isinstance(e, CollectiveError):
            self._blame_gone(e)

    def _blame_gone(self, e: CollectiveError) -> None:
        gone = self._who_is_gone()
        if gone:
            raise CollectiveError(f"{e}: {gone}; see its output") from e

    def _who_is_gone(self) -> str:
        end, gone = time.monotonic() + CERTAIN, ""
        while not gone and time.monotonic() < end:
            gone = self._gone_now()
            time.sleep(LOOK)
        return gone

    def _gone_now(self, but: Collection[int] = ()) -> str:
        """Other ranks whose processes have ended or are stopped, but for some; or that the store is gone."""
        try:
            fates = {r: self._fate(r) for r in self.ranks if r != self.rank and r not in but}
        except AutoshardError as e:
            return str(e)
        return "; ".join(f"the process of rank {r} {what}" for r, what in fates.items() if what)

    def _fate(self, rank: int) -> str:
        key = f"{self.prefix}/process/{rank}"
        if rank not in self._processes and self.store.check([key]):
            self._processes[rank] = self.store.get(key).decode()
        return fate(self._processes.get(rank, ""))

    def trouble(self, rank: int, waited: float) -> str:
        """Why waiting for `rank`, which took `waited` seconds so far, is in vain, or ""."""
        key = f"{self.prefix}/{rank}"
        if not self.store.check([key]):
            return missing(self.store, self.prefix, self.ranks, waited) if waited >= self.join_timeout else ""
        beat, now = Beat.read(self.store.get(key).decode()), time.monotonic()
        count, since = self._heard.get(rank, (-1, now))
        what = self._fate(rank)
        if what == ENDED:
            return f"the process of rank {rank} {what}; see its output"
        if beat.count != count:
            self._heard[rank] = beat.count, now
        elif now - since > LOST:
            return (f"rank {rank} has not been heard of for {now - since:.0f} s: its process {what or 'was killed or hangs'}; see its output")
        call, agreeing, mine = self.told
        if agreeing and not beat.agreeing and beat.call >= call:
            return (f"rank {rank} does not prepare call {call} with the others: {beat.what}, and this rank has {mine}; every rank "
                    "must call the same model in the same mode, with the same numbers in its modules and around its code, and inputs of the same "
                    "shapes and dtypes")
        return ""


def meet(store: Any, prefix: str, rank: int, ranks: Sequence[int], join_timeout: float = JOIN) -> None:
    """Wait until all `ranks` are here: process groups are made together, and torch waits for those that never come as long as
    for a collective. Raises AutoshardError, naming them, after `join_timeout` seconds."""
    store.set(f"{prefix}/{rank}", "here")
    start = time.monotonic()
    while not store.check([f"{prefix}/{r}" for r in ranks]):
        if time.monotonic() - start >= join_timeout:
            raise AutoshardError(f"making process groups: {missing(store, prefix, ranks, join_timeout)}")
        time.sleep(LOOK)


def missing(store: Any, prefix: str, ranks: Sequence[int], waited: float) -> str:
    """What to say of ranks that have not called `compile`; "" where all have."""
    gone = [str(r) for r in ranks if not store.check([f"{prefix}/{r}"])]
    if not gone:
        return ""
    return (f"rank{'s' if len(gone) > 1 else ''} {', '.join(gone)} did not call autoshard.compile for this mesh within {waited:.0f} s: killed "
            "before, or on another way through the program; see their output. Where they only need longer, give compile(join_timeout=SECONDS)")


def _beat(store: Any, key: str, told: list[Any], quiet: threading.Event) -> None:
    count = 0
    while dist.is_initialized():  # whoever destroyed the process group has nothing to tell, and the store may be gone
        call, agreeing, what = told
        count += 1
        try:
            store.set(key, f"{count} {call} {int(agreeing)} {what}")
        except RuntimeError as e:  # the store is gone, and with it whoever could read this
            log.debug("no more beats: %s", e)
            return
        if quiet.wait(BEAT):
            return


def _stop(quiet: threading.Event, thread: threading.Thread, store: PatientStore) -> None:
    quiet.set()
    if thread is not threading.current_thread() and not store.silent:  # else it waits for the store as well
        thread.join(STOP)
