"""How long the phases of planning take."""
from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from autoshard.decide.options import Progress
from autoshard.errors import Interrupted
from autoshard.search.board import Event
from autoshard.search.heap import settled_heap
from autoshard.search.mip import guarded


def cpu_seconds() -> float:
    """Of this process and of its solver processes."""
    return time.process_time() + guarded.cpu_seconds()


class PhaseTimer:
    """Times phases by wall clock and by CPU time of the process, and tells the user where the work is. `ended`: set once Ctrl-C ended a search, which
    those who search more than once ask: what was found by then may be proven, and says nothing of it."""

    def __init__(self, progress: Progress | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}
        self.ended = threading.Event()
        self._progress = progress or (lambda phase, detail: None)

    def say(self, phase: str, detail: str = "") -> None:
        """Announce a phase that is not timed, or news of one."""
        self._progress(phase, detail)

    def quiet(self) -> PhaseTimer:
        """For the phases of short searches: they are timed with all others, and nobody is told."""
        other = PhaseTimer()
        other.seconds, other.cpu_seconds, other.ended = self.seconds, self.cpu_seconds, self.ended
        return other

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        log = logging.getLogger(f"autoshard.{phase}")
        log.debug("begins")
        start, cpu = time.perf_counter(), cpu_seconds()
        try:
            self._progress(phase, "")
            with settled_heap():
                yield
        except Interrupted:
            raise
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted in the phase {phase!r}; there is no plan yet") from None
        finally:
            seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds  # stages of a pipeline go through the same phases
            self.cpu_seconds[phase] = self.cpu_seconds.get(phase, 0.0) + cpu
            log.info("took %.2f s (%.2f s of CPU time)", seconds, cpu)

    def search(self, e: Event) -> None:
        """Progress of the search: incumbent, bound, gap."""
        text = f"{e.cost:.6g} s, bound {e.bound:.6g} s, gap {e.gap:.2%} after {e.seconds:.1f} s {e.message}".strip()
        logging.getLogger("autoshard.search").debug(text)
        self._progress("search", text)
