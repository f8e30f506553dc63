"""The process group's key-value store, whose calls end: torch's wait for ever where the process that keeps the store is stopped."""
from __future__ import annotations

import threading
import weakref
from queue import Empty, SimpleQueue
from typing import Any

from autoshard.errors import AutoshardError

PATIENCE = 60.0
"""Seconds. Long: the keeper may be stopped for a while and go on."""


class PatientStore:
    """Calls run in a thread, since one inside torch cannot be ended. Raises AutoshardError where one takes longer than `PATIENCE`, and
    from then on at once (`silent` says why), and where the store is gone."""

    def __init__(self, store: Any) -> None:
        self.raw, self._asked, self.silent = store, SimpleQueue[Any](), ""
        threading.Thread(target=_answer, args=(store, self._asked), daemon=True, name="autoshard-store").start()
        weakref.finalize(self, self._asked.put, None)

    def set(self, key: str, value: str) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        return self._ask("get", key)

    def check(self, keys: list[str]) -> bool:
        return self._ask("check", keys)

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", key, amount)

    def _ask(self, name: str, *args: Any) -> Any:
        if self.silent:
            raise AutoshardError(self.silent)
        answer: SimpleQueue[Any] = SimpleQueue()
        self._asked.put((name, args, answer))
        try:
            value, error = answer.get(timeout=PATIENCE)
        except Empty:
            self.silent = (f"the process group's store gave no answer for {PATIENCE:.0f} s: the process that keeps it (usually rank 0) is stopped "
                            "or cannot be reached")
            raise AutoshardError(self.silent) from None
        if error is not None and not isinstance(error, RuntimeError):
            raise error
        if error is not None:
            raise AutoshardError("the process group's store is gone, and with it the process that kept it (usually rank 0); see its output "
                                 f"({(str(error).splitlines() or [type(error).__name__])[0]})") from None
        return value


def _answer(store: Any, asked: "SimpleQueue[Any]") -> None:
    while (question := asked.get()) is not None:
        name, args, answer = question
        try:
            answer.put((getattr(store, name)(*args), None))
        except Exception as e:  # for who asked: the thread goes on
            answer.put((None, e))
