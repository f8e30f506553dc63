"""Mixed-integer programs solved in a process that can be killed. See `worker.py` for why."""
from __future__ import annotations

import atexit
import logging
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np

from autoshard.search.mip import worker

log = logging.getLogger("autoshard")
GLANCE = 0.1  # seconds between two looks at whether anybody still waits for the answer
GRACE, PER_BYTE, MOST = 1.0, 2e-6, 10.0
"""Past its limit, before a solver is taken to hang: seconds, seconds per byte of the program, and the most of both. It looks at its clock between LP
solves only, whose length grows with the program; where it does hang, which its presolve does, it takes the time from what is searched after it."""
SHORTEST = 0.05
AT_ONCE = 150_000
"""Bytes of the longest program that is solved when there is no time any more: the first LP of longer ones takes seconds, which no clock ends."""


@dataclass(frozen=True)
class Answer:
    """`reason` and `limit` as MathOpt names them, or "KILLED"; `bound` of the program; `values` of the columns asked
    for, or None."""

    reason: str
    limit: str
    bound: float
    values: np.ndarray | None


def never() -> bool:
    """Of a search that nothing but its seconds ends."""
    return False


def solve_program(program: bytes, columns: int, *, solver: str, seconds: float, seed: int,
                  nodes: int | None = None, gap: float = 0.0, overdue: Callable[[], bool] = never) -> Answer:
    """Solve a serialized MathOpt model with `solver` ("milp" or "cp_sat") for at most `seconds` and, the same on every
    machine, at most `nodes` of its search tree, until the relative gap is `gap`. Once it is `overdue` its process is ended."""
    if seconds < SHORTEST and len(program) > AT_ONCE:
        return Answer("KILLED", "TIME", -np.inf, None)
    request = {"columns": columns, "solver": solver, "seconds": max(SHORTEST, seconds), "seed": seed, "nodes": nodes, "gap": gap}
    with _workers().borrowed() as worker:
        return worker.ask(request, program, overdue)


def start() -> None:
    """Start a solver process, unless one is idle, while the caller still prepares what it is for."""
    _workers().start()


def cpu_seconds() -> float:
    """CPU time that this process's solver processes have used."""
    return _workers().cpu_seconds()


class Worker:
    """One solver process."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        # -P: the script's own folder has modules with common names and is no place to import from
        self.process = subprocess.Popen([sys.executable, "-P", str(Path(worker.__file__))], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, env=environment, start_new_session=True)
        self.requests, self.answers = _pipes(self.process)
        self.cpu_seconds = 0.0

    def ask(self, request: dict[str, Any], program: bytes, overdue: Callable[[], bool] = never) -> Answer:
        """Kills the process when it does not answer; it is of no use after that."""
        try:
            worker.write(self.requests, request, program)
            grace = min(GRACE + PER_BYTE * len(program), MOST)
            if not self._ready(2 * request["seconds"] + grace, overdue):
                if overdue():
                    return self._give_up("")
                return self._give_up(f"it did not answer {grace:.1f} s after twice its limit of {request['seconds']:.2f} s")
            header, payload = worker.read(self.answers)
        except (EOFError, BrokenPipeError):
            return self._give_up("it crashed; what it said is above")
        except BaseException:  # interrupted half-way through a message: nobody could read the next one
            self.close()
            raise
        self.cpu_seconds = header["cpu_seconds"]
        return Answer(header["reason"], header["limit"], header["bound"], np.frombuffer(payload) if header["found"] else None)

    def _give_up(self, why: str) -> Answer:
        if why:
            log.warning("a solver process was ended: %s; the search goes on without its answer", why)
        self.close()
        return Answer("KILLED", "", -np.inf, None)

    def _ready(self, seconds: float, overdue: Callable[[], bool]) -> bool:
        end = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.answers, selectors.EVENT_READ)
            while not selector.select(GLANCE):
                if time.monotonic() > end or overdue():
                    return False
            return True

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.answers.close()
        try:
            self.requests.close()
        except BrokenPipeError:  # what was buffered has nobody to go to
            return


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    """(what it reads, what it writes)."""
    assert process.stdin is not None and process.stdout is not None, "a solver process is started with both pipes"
    return process.stdin, process.stdout


class Workers:
    """Idle solver processes, one for each thread that solves at the same time."""

    def __init__(self) -> None:
        self._idle: list[Worker] = []
        self._started: list[Worker] = []
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def start(self) -> None:
        with self.borrowed():
            return

    @contextmanager
    def borrowed(self) -> Iterator[Worker]:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is None or not worker.alive:
            worker = Worker()
            self._started.append(worker)
        yield worker
        if worker.alive:
            with self._lock:
                self._idle.append(worker)

    def cpu_seconds(self) -> float:
        return sum(worker.cpu_seconds for worker in self._started)

    def close(self) -> None:
        """End the processes; a forked child leaves those of its parent alone."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            for worker in self._started:  # also those that a thread still waits for
                if worker.alive:
                    worker.close()
            self._idle.clear()


@cache
def _workers() -> Workers:
    """Of this process; a forked child starts its own."""
    workers = Workers()
    atexit.register(workers.close)
    os.register_at_fork(after_in_child=_workers.cache_clear)
    return workers
