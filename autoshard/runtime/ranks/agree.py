"""Ranks agree through the process group's key-value store: on the call, on the graph, then on the leader's plan.

Nobody waits inside a collective, so a long search cannot run into a collective's timeout, and ranks that
would issue different collectives are found before the first one. Nobody waits for a rank that cannot come: errors
are published, and see runtime/ranks/heartbeat.py for ranks that are gone.
"""
from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from autoshard import errors
from autoshard.runtime.ranks.place import Place

log = logging.getLogger("autoshard")
FIRST_WAIT, LONGEST_WAIT, NEWS, LONG = 5e-5, 0.2, 15.0, 60.0
"""Seconds between two looks into the store, and between two lines of the log; behind the last one these are warnings, ever fewer."""
OUTSIDE = "numbers that the code reads from outside"
"""A fact that is told and not compared: ranks may differ in it where their programs are equal."""
ORDERS = {"graph of the model": f" ({OUTSIDE}, as a global or a config, may differ; and where a model goes through a set of texts, the order "
          "differs between processes: let it go through sorted(...))"}
"""Of facts that ranks differ in without a difference in the call: how that comes."""
T = TypeVar("T")


def share(place: Place, facts: str | Mapping[str, str], make: Callable[[], str], timeout: float = 3600.0) -> str:
    """The leader's `make()`, on every rank, once all ranks have shown equal `facts`.

    Raises LoweringError on all ranks where facts differ (naming which, where they have names), the leader's error
    where `make` fails, the error of a rank that failed in `alone` before, and AutoshardError when a rank is gone, runs
    something else, or gives no answer for `timeout` seconds."""
    if place.mesh.size == 1:
        return make()
    facts = {"program": facts} if isinstance(facts, str) else dict(facts)

    def judge(found: Iterator[tuple[int, str]]) -> str:
        _compare(facts, place.ranks[0], found)
        return make()

    return gathered(place, json.dumps(facts), judge, timeout)


def gathered(place: Place, text: str, judge: Callable[[Iterator[tuple[int, str]]], str], timeout: float = 3600.0, about: str = "facts") -> str:
    """What the leader's `judge` makes of every rank's `text`, as (rank, text) beginning with its own; on every rank. Raises what
    `judge` raises on all ranks, and as `share` does; LoweringError where another rank's text is not `about` the same."""
    store, prefix = _round(place)
    if not place.is_leader:
        store.set(f"{prefix}/facts/{dist.get_rank()}", f"value {json.dumps([about, place.pulse.told[2], text])}")
        leader = place.ranks[0]
        doing = "plan" if about == "facts" else f"compare {about}"
        return _value(_wait(store, f"{prefix}/answer", timeout, f"rank {leader} to {doing}", place, leader), leader, True)
    try:
        text = judge(_told(store, prefix, place, text, timeout, about))
    except BaseException as e:
        store.set(f"{prefix}/answer", _described(e))
        raise
    store.set(f"{prefix}/answer", f"value {text}")
    return text


def alike(place: Place, text: str, timeout: float = 3600.0) -> bool:
    """Whether all ranks say the same. Raises as `share` does."""
    return place.mesh.size == 1 or gathered(place, text, lambda found: str(len({said for _, said in found}) == 1), timeout) == "True"


def alone(place: Place, work: Callable[[], T]) -> T:
    """`work()`, which each rank does for itself before the next `share`. Where it fails, that `share` raises on
    the other ranks, instead of waiting for a rank that never comes."""
    try:
        return work()
    except BaseException as e:
        if place.mesh.size > 1:
            stay_away(place, e)
        raise


def stay_away(place: Place, e: BaseException) -> None:
    """Take part in the next exchange with the reason why this rank does not come. Where the store is gone nobody can be told."""
    try:
        store, prefix = _round(place)
        store.set(f"{prefix}/answer" if place.is_leader else f"{prefix}/facts/{dist.get_rank()}", _described(e))
    except errors.AutoshardError as gone:
        log.warning("the other ranks are not told of an error here: %s", gone)


def _round(place: Place) -> tuple[Any, str]:
    """The store, and the prefix of this rank's next exchange; ranks count theirs in step."""
    store = place.store
    call = store.add(f"autoshard/calls/{_of(place)}/{dist.get_rank()}", 1)
    return store, f"autoshard/{_of(place)}/{call}"


def _of(place: Place) -> str:
    return f"{place.ranks[0]}-{place.ranks[-1]}-{len(place.ranks)}-{place.mesh}"


def _told(store: Any, prefix: str, place: Place, text: str, timeout: float, about: str) -> Iterator[tuple[int, str]]:
    leader = place.ranks[0]
    yield leader, text
    for rank in place.ranks[1:]:
        said = _value(_wait(store, f"{prefix}/facts/{rank}", timeout, f"rank {rank} to come to the same call", place, rank), rank)
        subject, does, theirs = json.loads(said)
        if subject != about:  # one of them goes on with a variant that it has, the other prepares one
            mine = place.pulse.told[2]
            raise _different(leader, rank, f"{mine} against {does}" if mine != does else
                             f"{mine} on both, so attributes, modes or numbers of modules, or numbers that the loss reads, differ")
        yield rank, theirs


def _different(leader: int, rank: int, how: str) -> errors.LoweringError:
    return errors.LoweringError(f"ranks {leader} and {rank} call different programs: {how}. "
                                "Every rank must call the same model in the same mode, with the same options and inputs of the same shapes "
                                "(where the last batches of ranks differ: drop_last=True in the DataLoader)")


def _compare(mine: Mapping[str, str], leader: int, found: Iterator[tuple[int, str]]) -> None:
    for rank, text in found:
        theirs = json.loads(text)
        if {**mine, OUTSIDE: ""} != {**theirs, OUTSIDE: ""}:
            raise _different(leader, rank, _difference(mine, theirs))


def _difference(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """The first fact that differs, and of a fact with many lines the first of those."""
    name = next(name for name in (*mine, *theirs) if name != OUTSIDE and mine.get(name) != theirs.get(name))
    a, b = mine.get(name, "nothing"), theirs.get(name, "nothing")
    lines = zip(a.splitlines() + ["nothing"], b.splitlines() + ["nothing"], strict=False)
    x, y = next(((x, y) for x, y in lines if x != y), (a, b))
    there, here = (facts.get(OUTSIDE) or "as at first" for facts in (mine, theirs))
    return f"{name}: {x} against {y}{ORDERS.get(name, '')}" + (f", with {OUTSIDE}: {there} against {here}" if there != here else "")


def _described(e: BaseException) -> str:
    """A kind that only its own module knows is told as the public one it is of."""
    name = next((kind.__name__ for kind in type(e).__mro__ if kind.__name__ in vars(errors)), type(e).__name__)
    return f"error {name} {e}"


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


def _wait(store: Any, key: str, timeout: float, what: str, place: Place, rank: int) -> str:
    """The text under `key`, which `rank` writes. Looks often at first and seldom later."""
    start, pause, news, looked = time.monotonic(), FIRST_WAIT, NEWS, 0.0
    while not _is_there(store, key, what):
        waited = time.monotonic() - start
        if waited >= timeout:
            raise errors.AutoshardError(f"waited {waited:.0f} s for {what}; see its output for the cause")
        if waited >= news:
            if waited < LONG:
                log.info("waiting for %s (%.0f s)", what, waited)
            else:
                log.warning("rank %d has waited %.0f s for %s: if it is not at that, but in a call that all ranks must make (saving a checkpoint, "
                            "full_tensor()), take it outside of `if rank == 0`", dist.get_rank(), waited, what)
            news += NEWS if waited < LONG else waited
        if waited - looked > 1.0:
            trouble, looked = place.pulse.trouble(rank, waited), waited
            if trouble and not _is_there(store, key, what):  # it may have answered just now
                raise errors.AutoshardError(f"waiting for {what}: {trouble}")
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_WAIT)
    return store.get(key).decode()


def _is_there(store: Any, key: str, what: str) -> bool:
    try:
        return store.check([key])
    except errors.AutoshardError as e:
        raise errors.AutoshardError(f"waiting for {what}: {e}") from None
