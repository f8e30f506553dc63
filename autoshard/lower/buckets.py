"""Small gradients reduced together: one call instead of many, at the price of one copy.

Which gradients share a call is a function of the schedule alone, so all ranks agree. A large gradient gains nothing: its call is
long already, and without a bucket it is reduced where it lies.
"""
from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from autoshard.cost.shared_calls import SMALL

T = TypeVar("T")


@dataclass(frozen=True)
class Flight(Generic[T]):
    """Something on its way between two positions of a window: it starts before the op at `at` runs, and is waited for before the
    one at `until`. Flights of equal `key` may share a call of `nbytes` each; with None it stays alone."""

    what: T
    at: int
    until: int
    nbytes: int = 0
    key: Hashable | None = None


def shared_calls(flights: Sequence[Flight[T]], most: int) -> tuple[tuple[Flight[T], ...], ...]:
    """`flights`, which are in the order of their starts, by the call they share, in the order of its start: it starts with the last of
    them and is waited for with the first, so a flight that starts after that wait is in another call. `most`: bytes of a call."""
    groups = list(_grouped(flights, most))
    order = {id(flight): i for i, flight in enumerate(flights)}
    return tuple(sorted(groups, key=lambda group: order[id(group[-1])]))


def _grouped(flights: Sequence[Flight[T]], most: int) -> Iterator[tuple[Flight[T], ...]]:
    filling: dict[Hashable, list[Flight[T]]] = {}
    for flight in flights:
        if flight.key is None or flight.nbytes > SMALL:
            yield (flight,)
            continue
        members = filling.setdefault(flight.key, [])
        if members and (flight.at > min(m.until for m in members) or sum(m.nbytes for m in members) + flight.nbytes > most):
            yield tuple(members)
            members = filling[flight.key] = []
        members.append(flight)
    yield from (tuple(members) for members in filling.values())
