"""Ranks agree through the process group's key-value store: on the graph, then on the leader's plan.

Nobody waits inside a collective, so a long search cannot run into a collective's timeout, and ranks that
would issue different collectives are found before the first one.
"""
from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from autoshard import _torch, errors
from autoshard.runtime.place import Place

log = logging.getLogger("autoshard")
POLL = timedelta(seconds=15)
T = TypeVar("T")


def share(place: Place, facts: str, make: Callable[[], str], timeout: float = 3600.0) -> str:
    """The leader's `make()`, on every rank, once all ranks have shown equal `facts`.

    Raises LoweringError on all ranks where facts differ, the leader's error where `make` fails, the error of a
    rank that failed in `alone` before, and AutoshardError after `timeout` seconds without an answer."""
    if place.mesh.size == 1:
        return make()
    store, prefix = _round(place)
    if not place.is_leader:
        store.set(f"{prefix}/facts/{dist.get_rank()}", f"value {facts}")
        return _value(_wait(store, f"{prefix}/answer", timeout, f"rank {place.ranks[0]} to plan"), place.ranks[0], True)
    try:
        _compare(store, prefix, place, facts, timeout)
        text = make()
    except BaseException as e:
        store.set(f"{prefix}/answer", _described(e))
        raise
    store.set(f"{prefix}/answer", f"value {text}")
    return text


def alone(place: Place, work: Callable[[], T]) -> T:
    """`work()`, which each rank does for itself before the next `share`. Where it fails, that `share` raises on
    the other ranks, instead of waiting for a rank that never comes."""
    try:
        return work()
    except BaseException as e:
        if place.mesh.size > 1:
            store, prefix = _round(place)
            store.set(f"{prefix}/answer" if place.is_leader else f"{prefix}/facts/{dist.get_rank()}", _described(e))
        raise


def _round(place: Place) -> tuple[Any, str]:
    """The store, and the prefix of this rank's next exchange; ranks count theirs in step."""
    store = _torch.default_store()
    call = store.add(f"autoshard/calls/{_of(place)}/{dist.get_rank()}", 1)
    return store, f"autoshard/{_of(place)}/{call}"


def _of(place: Place) -> str:
    return f"{place.ranks[0]}-{place.ranks[-1]}-{len(place.ranks)}-{place.mesh}"


def _compare(store: Any, prefix: str, place: Place, facts: str, timeout: float) -> None:
    for rank in place.ranks[1:]:
        theirs = _value(_wait(store, f"{prefix}/facts/{rank}", timeout, f"rank {rank} to trace"), rank)
        if theirs != facts:
            raise errors.LoweringError(
                f"ranks {place.ranks[0]} and {rank} call different programs ({facts} against {theirs}); every rank must call the "
                "same model in the same mode with inputs of the same shapes")


def _described(e: BaseException) -> str:
    return f"error {type(e).__name__} {e}"


def _value(text: str, rank: int, relayed: bool = False) -> str:
    """What a rank published. Raises the error it published instead, of the same kind where it is one of ours.
    What the leader says is `relayed` to all, and may be another rank's error."""
    kind, _, rest = text.partition(" ")
    if kind == "value":
        return rest
    name, _, message = rest.partition(" ")
    if name not in vars(errors):
        raise errors.AutoshardError(f"rank {rank} failed: {name}: {message}")
    raise getattr(errors, name)(message if relayed else f"rank {rank} failed: {message}")


def _wait(store: Any, key: str, timeout: float, what: str) -> str:
    start = time.monotonic()
    while True:
        left = timeout - (time.monotonic() - start)
        try:
            store.wait([key], min(POLL, timedelta(seconds=max(left, 0.1))))
            return store.get(key).decode()
        except RuntimeError:  # DistStoreError: not there yet
            waited = time.monotonic() - start
            if waited >= timeout:
                raise errors.AutoshardError(f"waited {waited:.0f} s for {what}; see its output for the cause") from None
            log.info("waiting for %s (%.0f s)", what, waited)
