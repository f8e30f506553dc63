"""Adds sends and receives to a table of computations.

All ranks get their part of one order of all actions in which a send is followed at once by its receive. So the ranks end even if a send
returns only when its receive has been posted, and the two ends of a wire agree on the order of what passes through it.
"""
from __future__ import annotations

from autoshard.pipeline.action_lists.actions import Action, ActionTable
from autoshard.pipeline.action_lists.network import network_of
from autoshard.pipeline.action_lists.play import Seconds, play

UNIT = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # the order that schedules are drawn for


def with_transfers(table: ActionTable, seconds: Seconds | None = None) -> ActionTable:
    """`table` with SEND and RECV actions, in the order of a run in which actions last `seconds`: a send stands behind the computation that
    makes the value, its receive behind what the other rank had begun by then."""
    network = network_of(table)
    played = play(network, seconds or Seconds.per_stage(table.stages, **UNIT))
    ranks: list[list[Action]] = [[] for _ in table.ranks]
    starts = list(zip(played.start.tolist(), (e.kind.startswith("SEND") for e in network.events)))
    for number in sorted(range(len(starts)), key=lambda e: (starts[e][0], not starts[e][1], e)):
        event = network.events[number]
        ranks[table.rank_of[event.stage]].append(event)
        if starts[number][1]:
            received = receive_of(event)
            ranks[table.rank_of[received.stage]].append(received)
    return ActionTable(tuple(map(tuple, ranks)), table.rank_of, table.microbatches)


def receive_of(send: Action) -> Action:
    """The receive at the other end of `send`."""
    if send.kind == "SEND_F":
        return Action("RECV_F", send.stage + 1, send.microbatch)
    return Action("RECV_B", send.stage - 1, send.microbatch)
