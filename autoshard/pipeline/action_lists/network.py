"""A table of actions as a network of events: what every action waits for.

An event is a computation, or a transfer between two ranks; transfers on one wire (two ranks, one direction) do not overlap. An event waits
for the one before it on its rank or wire, and for the one that makes its value. The events of a `Network` are numbered so that each comes
after both; a table for which there is no such numbering never ends.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.errors import ScheduleError
from autoshard.pipeline.action_lists.action_text import text_of
from autoshard.pipeline.action_lists.actions import COMPUTE, KINDS, ONCE_A_STEP, Action, ActionTable

NOTHING = -1
NUMBER: dict[str, int] = {kind: number for number, kind in enumerate(KINDS)}


@dataclass(frozen=True, eq=False)
class Network:
    """`before[e]`, `source[e]`: the two events that e waits for, or NOTHING; `place[e]`: its rank, or NOTHING on a wire; `price[e]`: where its
    seconds are in a flat array of (kind, stage)."""

    table: ActionTable
    events: tuple[Action, ...]
    before: np.ndarray
    source: np.ndarray
    place: np.ndarray

    @cached_property
    def price(self) -> np.ndarray:
        return np.array([NUMBER[e.kind] * self.table.stages + e.stage for e in self.events], dtype=np.int64)


def network_of(table: ActionTable) -> Network:
    """The network of `table`, whose own sends and receives are ignored: a value travels as soon as it is made.

    Raises ScheduleError where the actions wait for each other in a circle."""
    lines = _lines(table)
    order = list(_in_order(table, lines))
    number = {event: i for i, event in enumerate(order)}
    before = {late: early for line in lines for early, late in zip(line, line[1:])}
    place = {event: rank if rank < len(table.ranks) else NOTHING for rank, line in enumerate(lines) for event in line}
    sources = (source_of(event, table) for event in order)
    return Network(
        table, tuple(order),
        before=np.array([number[before[e]] if e in before else NOTHING for e in order], dtype=np.int64),
        source=np.array([NOTHING if s is None else number[s] for s in sources], dtype=np.int64),
        place=np.array([place[e] for e in order], dtype=np.int64),
    )


def crosses(stage: int, other: int, table: ActionTable) -> bool:
    """Whether what stage `stage` makes for stage `other` goes to another rank."""
    return 0 <= other < table.stages and table.rank_of[stage] != table.rank_of[other]


def transfer_of(action: Action, table: ActionTable) -> Action | None:
    """The send that follows `action`, if another rank needs what it makes."""
    if action.kind == "F" and crosses(action.stage, action.stage + 1, table):
        return Action("SEND_F", action.stage, action.microbatch)
    if action.kind in ("B", "I") and crosses(action.stage, action.stage - 1, table):
        return Action("SEND_B", action.stage, action.microbatch)
    return None


def source_of(event: Action, table: ActionTable) -> Action | None:
    """The event that makes what `event` reads, if that is not simply an earlier one of its own stage."""
    stage, m = event.stage, event.microbatch
    if event.kind == "SEND_F":
        return Action("F", stage, m)
    if event.kind == "SEND_B":
        return _backward(stage, m, table)
    if event.kind == "F" and stage > 0:
        made = Action("F", stage - 1, m)
    elif event.kind in ("B", "I") and stage < table.stages - 1:
        made = _backward(stage + 1, m, table)
    else:
        return None
    return transfer_of(made, table) or made


def _backward(stage: int, microbatch: int | None, table: ActionTable) -> Action:
    """The action that makes the gradient which `stage` hands back: a table may have both forms."""
    whole = Action("B", stage, microbatch)
    return whole if whole in table.computed else Action("I", stage, microbatch)


def _lines(table: ActionTable) -> list[list[Action]]:
    """What is done one by one: the computations of each rank, and then the transfers of each wire."""
    ranks = [[a for a in actions if a.kind in COMPUTE | ONCE_A_STEP] for actions in table.ranks]
    wires: dict[tuple[int, int, str], list[Action]] = {}
    for rank, actions in enumerate(ranks):
        for send in filter(None, (transfer_of(a, table) for a in actions)):
            receiver = table.rank_of[send.stage + (1 if send.kind == "SEND_F" else -1)]
            wires.setdefault((rank, receiver, send.kind), []).append(send)
    return [*ranks, *wires.values()]


def _in_order(table: ActionTable, lines: Sequence[list[Action]]) -> Iterator[Action]:
    """All events, each after those that it waits for: lines go on as far as they can, and sleep on the event that they need."""
    done: set[Action] = set()
    heads = [0] * len(lines)
    sleeping: dict[Action, int] = {}
    awake = list(range(len(lines)))[::-1]
    while awake:
        line = awake.pop()
        while heads[line] < len(lines[line]):
            event = lines[line][heads[line]]
            source = source_of(event, table)
            if source is not None and source not in done:
                sleeping[source] = line
                break
            heads[line] += 1
            done.add(event)
            yield event
            if event in sleeping:
                awake.append(sleeping.pop(event))
    stuck = {rank: lines[rank][heads[rank]] for rank in range(len(table.ranks)) if heads[rank] < len(lines[rank])}
    if stuck:
        raise ScheduleError("the schedule never ends: " + "; ".join(_waits(rank, event, table) for rank, event in stuck.items()))


def _waits(rank: int, event: Action, table: ActionTable) -> str:
    source = source_of(event, table)
    return f"rank {rank} is at {text_of(event)}, which waits for {'itself' if source is None else text_of(source)}"
