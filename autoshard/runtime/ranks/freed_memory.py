"""What a step frees on a CPU stays with the process, as it does on a GPU, where torch caches it.

glibc gives memory at the end of its heap back to the system as soon as it is free, and large tensors as soon as they die. The next step asks for
the same bytes again, and the system fills every page with zeros once more: half a second per gibibyte. Two thresholds of `mallopt(3)` say how much
stays. Tensors above KEPT are still given back, so that memory kept for sizes that never come again is bounded."""
from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Mapping

KEPT = 32 << 20
"""Bytes of a block, up to which it lies in the heap: as high as glibc lets this threshold grow by itself."""
NEVER = 2**31 - 1
"""Bytes at the end of the heap that are given back: `mallopt` takes no more."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
log = logging.getLogger("autoshard")


def keep_freed_memory(environment: Mapping[str, str] | None = None) -> bool:
    """Ask the allocator to keep what is freed. Returns whether it does: not where it is another one than glibc's, nor where the user has set
    one of its thresholds (MALLOC_TRIM_THRESHOLD_=131072 is glibc's own)."""
    if not sys.platform.startswith("linux") or _is_chosen(os.environ if environment is None else environment):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    kept = bool(libc.mallopt(M_MMAP_THRESHOLD, KEPT) and libc.mallopt(M_TRIM_THRESHOLD, NEVER))
    log.debug("memory that a step frees %s", "stays with this process" if kept else "goes back to the system: mallopt refused")
    return kept


def _is_chosen(environment: Mapping[str, str]) -> bool:
    """Whether the user has said how memory is to be allocated: by thresholds of glibc or with another allocator."""
    return "malloc" in environment.get("GLIBC_TUNABLES", "") or "malloc" in environment.get("LD_PRELOAD", "") or any(
        name in environment for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_"))
