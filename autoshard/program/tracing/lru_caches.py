"""Clears `functools.lru_cache`s that hold tensors of a trace.

Libraries that run in eager mode may cache results. A fake tensor left in a cache would reach the user's model after the trace."""
from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autoshard import _torch
from autoshard._torch import pytree
from autoshard.program.tracing.tape import TORCH_DIR


@contextmanager
def kept_clean(mode: str) -> Iterator[None]:
    """On exit, clear every cache that holds a tensor of a trace. Only in `mode` "eager", and only where code outside of torch called
    `torch.compiler.is_compiling`: the scan of all caches takes about 50 ms."""
    asked, told = [], torch.compiler.is_compiling

    def is_compiling() -> bool:
        if not asked and not sys._getframe(1).f_code.co_filename.startswith(TORCH_DIR):
            asked.append(True)
        return told()

    if mode != "eager":
        yield
        return
    torch.compiler.is_compiling = is_compiling
    try:
        yield
    finally:
        torch.compiler.is_compiling = told
        if asked:
            for cache in [o for o in gc.get_objects() if type(o) is functools._lru_cache_wrapper]:  # isinstance asks a proxy's dead object
                if _holds_a_trace(cache):
                    cache.cache_clear()


def _holds_a_trace(cache: Any) -> bool:
    """A bounded cache refers to its keys and results, an unbounded one to a table of results."""
    known = gc.get_referents(cache)
    values = known + [v for table in known if isinstance(table, dict) for v in table.values()]
    return any(_torch.is_traced(leaf) for v in values if isinstance(v, (torch.Tensor, tuple, list, dict)) for leaf in pytree.tree_leaves(v))
