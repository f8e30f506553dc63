"""Memory of this process: what it could still get, and what it holds without need."""
from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path


def free_memory() -> float:
    """Bytes this machine could give to this process now; where Linux says it, with what it would free for that."""
    facts = Path("/proc/meminfo")
    found = re.search(r"^MemAvailable:\s+(\d+) kB", facts.read_text(), re.MULTILINE) if facts.exists() else None
    if found:
        return 1024.0 * int(found[1])
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def give_back_memory() -> None:
    """Return freed memory to the system where the C library keeps it (glibc): after many arrays of a hundred kilobytes that was a third of a
    search's memory. Elsewhere nothing happens."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
