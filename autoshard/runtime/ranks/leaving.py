"""The end of a program: no gloo thread may hold a tensor when the interpreter shuts down.

A worker thread of gloo's drops a collective's tensors after it has told the caller that the call is done, and on a busy machine long
after. Dropping a tensor that Python knows takes Python's lock, and a thread that wants it while the interpreter shuts down is ended
by force, which aborts the process ("terminate called without an active exception"). The threads end with their process group; but
`destroy_process_group` leaves it to those who hold it, and DeviceMesh holds the groups of its axes.
"""
from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard import _torch

log = logging.getLogger("autoshard")
TASKS = Path("/proc/self/task")
WORKER = "pt_gloo_runloop"
PATIENCE, LOOK = 10.0, 0.002
"""Seconds that an exit waits at most, and between looks."""


def leave_in_order(device_mesh: DeviceMesh, started: bool) -> None:
    """See to it that a program which uses this mesh on CPUs can end. `started`: its default process group was made for the mesh by us,
    so destroying it is ours where the program does not."""
    world = weakref.ref(dist.group.WORLD) if started else lambda: None
    atexit.register(_leave, weakref.ref(device_mesh), world)


def _leave(device_mesh: Any, world: Any) -> None:
    if dist.is_initialized() and dist.group.WORLD is world():
        end = threading.Thread(target=_destroy, daemon=True, name="autoshard-end")  # gloo waits for calls that others never join
        end.start()
        end.join(PATIENCE)
    mesh = device_mesh()
    if mesh is not None and not dist.is_initialized():
        _torch.forget_groups(mesh)
    _until_idle()


def _destroy() -> None:
    try:
        dist.destroy_process_group()
    except (RuntimeError, ValueError) as e:
        log.debug("the process group could not be destroyed at exit: %s", e)


def _until_idle() -> None:
    """Wait until gloo's workers sleep, which they do when they hold nothing. Groups that somebody still holds have them."""
    end, idle = time.monotonic() + PATIENCE, 0
    while idle < 2 and time.monotonic() < end:
        idle = 0 if any(map(_runs, _workers())) else idle + 1
        time.sleep(LOOK)  # gives them Python's lock


def _workers() -> list[Path]:
    return [t for t in TASKS.iterdir() if _read(t / "comm").startswith(WORKER)] if TASKS.exists() else []


def _runs(task: Path) -> bool:
    """Whether a thread runs or waits for a core; not while it sleeps."""
    state = _read(task / "stat").rpartition(") ")[2][:1]
    return state in ("R", "D")


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # the thread has ended
        return ""
