"""Ranks agree through the process group's key-value store: on the graph, then on the leader's plan.

Nobody waits inside a collective, so a long search cannot run into a collective's timeout, and ranks that
would issue different collectives are found before the first one.
"""
from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from autoshard import _torch, errors
from autoshard.runtime.place import Place

log = logging.getLogger("autoshard")
POLL = timedelta(seconds=15)


def share(place: Place, facts: str, make: Callable[[], str], timeout: float = 3600.0) -> str:
    """The leader's `make()`, on every rank, once all ranks have shown equal `facts`.

    Raises LoweringError on all ranks where facts differ, the leader's error where `make` fails, and
    AutoshardError after `timeout` seconds without an answer."""
    if place.mesh.size == 1:
        return make()
    store, me = _torch.default_store(), dist.get_rank()
    call = store.add(f"autoshard/calls/{_of(place)}/{me}", 1)
    prefix = f"autoshard/{_of(place)}/{call}"
    store.set(f"{prefix}/facts/{me}", facts)
    if not place.is_leader:
        return _answer(_wait(store, f"{prefix}/answer", timeout, "rank %d to plan" % place.ranks[0]).decode())
    try:
        _compare(store, prefix, place, facts, timeout)
        text = make()
    except BaseException as e:
        store.set(f"{prefix}/answer", f"error {type(e).__name__} {e}")
        raise
    store.set(f"{prefix}/answer", f"value {text}")
    return text


def _of(place: Place) -> str:
    return f"{place.ranks[0]}-{place.ranks[-1]}-{len(place.ranks)}-{place.mesh}"


def _compare(store: Any, prefix: str, place: Place, facts: str, timeout: float) -> None:
    for rank in place.ranks:
        theirs = _wait(store, f"{prefix}/facts/{rank}", timeout, f"rank {rank} to trace").decode()
        if theirs != facts:
            raise errors.LoweringError(
                f"ranks {place.ranks[0]} and {rank} call different programs ({facts} against {theirs}); every rank must call the "
                "same model in the same mode with inputs of the same shapes")


def _answer(text: str) -> str:
    kind, _, rest = text.partition(" ")
    if kind == "value":
        return rest
    name, _, message = rest.partition(" ")
    error = getattr(errors, name, errors.AutoshardError)
    raise error(message if error is not errors.AutoshardError else f"the leading rank failed with {name}: {message}")


def _wait(store: Any, key: str, timeout: float, what: str) -> bytes:
    start = time.monotonic()
    while True:
        left = timeout - (time.monotonic() - start)
        try:
            store.wait([key], min(POLL, timedelta(seconds=max(left, 0.1))))
            return store.get(key)
        except RuntimeError:  # DistStoreError: not there yet
            waited = time.monotonic() - start
            if waited >= timeout:
                raise errors.AutoshardError(f"waited {waited:.0f} s for {what}; see its output for the cause") from None
            log.info("waiting for %s (%.0f s)", what, waited)
