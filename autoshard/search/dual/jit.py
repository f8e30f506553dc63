"""How the loops are compiled: without the GIL, and cached on disk where there is a place for it."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """`function` compiled on its first call. Where no cache directory can be written, every process compiles anew."""
    try:
        return cast(F, njit(cache=True, nogil=True)(function))
    except RuntimeError:  # numba found no directory for this file: slower starts, the same answers
        return cast(F, njit(nogil=True)(function))
