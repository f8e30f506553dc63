"""Settings of the garbage collector during a search, and during the other phases of planning."""
from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS = 100_000  # made between two looks of the collector


@contextmanager
def settled_heap(tidy: bool = False) -> Iterator[None]:
    """What exists already (a traced model, torch itself) is not gone through each time the collector looks at what is made here, and it looks less
    often: that took a fifth of the time of reductions, and of tracing. Objects made here are still collected.
    Nothing happens where the caller has settings of its own. `tidy`: what is left of them is collected at the end, before it is among what exists
    already, which is hardly ever looked at: for short searches, of which a price is kept."""
    before = gc.get_threshold()
    if before[0] >= OBJECTS or not gc.isenabled() or gc.get_freeze_count():  # the last goes through all that is frozen
        yield
        return
    gc.freeze()
    gc.set_threshold(OBJECTS, *before[1:])
    try:
        yield
    finally:
        if tidy:
            gc.collect()
        gc.set_threshold(*before)
        gc.unfreeze()
