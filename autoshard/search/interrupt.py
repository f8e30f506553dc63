"""Ctrl-C during a search: the first asks it to stop with its best choice, a second one raises KeyboardInterrupt as usual."""
from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from autoshard.search.clock import Clock


@contextmanager
def stopping(clock: Clock, on: bool = True) -> Iterator[None]:
    """While active, SIGINT stops `clock` instead of raising KeyboardInterrupt, once. Nothing changes where it is not `on`, outside of
    the main thread, and where the program has a handler of its own."""
    usual = signal.getsignal(signal.SIGINT)
    if not on or threading.current_thread() is not threading.main_thread() or usual is not signal.default_int_handler:
        yield
        return

    def stop(number: int, frame: object) -> None:
        clock.stop = True
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
