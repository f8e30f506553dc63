"""How the loops are compiled: without the GIL, and cached on disk where there is a place for it."""
from __future__ import annotations

from collections.abc import Callable

from numba import njit


def compiled(function: Callable) -> Callable:
    """`function` compiled on its first call. Where no cache directory can be written, every process compiles anew."""
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:  # numba found no directory for this file: slower starts, the same answers
        return njit(nogil=True)(function)
