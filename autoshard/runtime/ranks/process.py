"""What has become of another rank's process, where it runs on this machine: asked of the kernel, which knows at once."""
from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")
ENDED, STOPPED = "has ended", "is stopped"
"""What may have become of it: it is over; a signal or a debugger holds it."""
STATES = {"Z": ENDED, "X": ENDED, "T": STOPPED, "t": STOPPED}


def here() -> str:
    """This process as text, for `fate` on another rank: machine, namespace of process ids, id, time of start. "" without /proc."""
    try:
        return " ".join((*_machine(), str(os.getpid()), _stat(os.getpid())[1]))
    except OSError:
        return ""


def fate(text: str) -> str:
    """`ENDED` or `STOPPED` for a process that `here` described; "" if it runs, or is of another machine."""
    if not text or not here() or tuple(text.split()[:2]) != _machine():
        return ""
    pid, began = text.split()[2:]
    try:
        state, start = _stat(int(pid))
    except OSError:
        return ENDED
    return ENDED if start != began else STATES.get(state, "")


def _machine() -> tuple[str, str]:
    """Equal where process ids mean the same."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip(), os.readlink(PROC / "self/ns/pid")


def _stat(pid: int) -> tuple[str, str]:
    """State and time of start. The name before them may have spaces and parentheses."""
    fields = (PROC / str(pid) / "stat").read_text().rpartition(") ")[2].split()
    return fields[0], fields[19]
