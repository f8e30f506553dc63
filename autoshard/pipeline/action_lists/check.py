"""Proves that a table of actions does a whole step and ends. Raises ScheduleError that names the first fault."""
from __future__ import annotations

from collections import Counter

from autoshard.errors import ScheduleError
from autoshard.pipeline.action_lists.action_text import text_of
from autoshard.pipeline.action_lists.actions import COMPUTE, TRANSFER, Action, ActionTable
from autoshard.pipeline.action_lists.network import network_of, source_of
from autoshard.pipeline.action_lists.transfers import receive_of


def check(table: ActionTable) -> None:
    """Every stage has forward and backward of every micro-batch, once, on its own rank and in this order; the values that cross ranks are sent
    and received, if the table has transfers at all; and the ranks come to their ends."""
    _check_whole(table)
    for rank, actions in enumerate(table.ranks):
        _check_rank(rank, actions, table)
    network_of(table)
    if any(a.kind in TRANSFER for actions in table.ranks for a in actions):
        _check_transfers(table)
        _run_in_step(table)


def _check_whole(table: ActionTable) -> None:
    counts = Counter(a for actions in table.ranks for a in actions)
    twice = [a for a, n in counts.items() if n > 1]
    if twice:
        raise ScheduleError(f"the schedule has {text_of(twice[0])} {counts[twice[0]]} times")
    for stage in range(table.stages):
        for m in range(table.microbatches):
            have = {kind for kind in COMPUTE if Action(kind, stage, m) in counts}
            if have not in ({"F", "B"}, {"F", "I", "W"}):
                raise ScheduleError(f"the schedule has {' and '.join(sorted(have)) or 'nothing'} of stage {stage}, micro-batch {m}: "
                                    "F and B are needed, or F, I and W")


def _check_rank(rank: int, actions: tuple[Action, ...], table: ActionTable) -> None:
    seen: set[Action] = set()
    for action in actions:
        if not 0 <= action.stage < table.stages or table.rank_of[action.stage] != rank:
            raise ScheduleError(f"rank {rank} has {text_of(action)}, but it has no stage {action.stage}")
        needed = _needed_on_rank(action, table)
        if needed is not None and needed not in seen:
            raise ScheduleError(f"rank {rank} has {text_of(action)} before {text_of(needed)}")
        seen.add(action)


def _needed_on_rank(action: Action, table: ActionTable) -> Action | None:
    """What must stand before `action` in the list of its own rank."""
    if action.kind in ("B", "I"):
        return Action("F", action.stage, action.microbatch)
    if action.kind == "W":
        return Action("I", action.stage, action.microbatch)
    return source_of(action, table) if action.kind in ("SEND_F", "SEND_B") else None


def _check_transfers(table: ActionTable) -> None:
    """What crosses ranks is what the sends and receives carry."""
    listed = {a for actions in table.ranks for a in actions if a.kind in TRANSFER}
    sent = {e for e in network_of(table).events if e.kind in TRANSFER}
    needed = sent | {receive_of(send) for send in sent}
    if missing := sorted(map(text_of, needed - listed)):
        raise ScheduleError(f"the schedule has transfers, but {len(missing)} are missing, {missing[0]} for one")
    if extra := sorted(map(text_of, listed - needed)):
        raise ScheduleError(f"{extra[0]} carries nothing that another rank needs")
    for rank, actions in enumerate(table.ranks):
        _check_received(rank, actions, table)


def _check_received(rank: int, actions: tuple[Action, ...], table: ActionTable) -> None:
    received: set[Action] = set()
    for action in actions:
        source = source_of(action, table) if action.kind in COMPUTE else None
        if source is not None and source.kind in TRANSFER and receive_of(source) not in received:
            raise ScheduleError(f"rank {rank} has {text_of(action)} before {text_of(receive_of(source))}, whose value it reads")
        if action.kind in TRANSFER:
            received.add(action)


def _run_in_step(table: ActionTable) -> None:
    """Runs the ranks as if each did one action at a time and a send returned only when the other rank stands at its receive. Whoever
    goes first, the same actions are done, so one run is the proof for all."""
    heads = [0] * len(table.ranks)
    awake = list(range(len(table.ranks)))
    while awake:
        rank = awake.pop()
        while heads[rank] < len(table.ranks[rank]):
            action = table.ranks[rank][heads[rank]]
            if action.kind in TRANSFER:
                other = _other_end(action)
                there = table.rank_of[other.stage]
                if heads[there] == len(table.ranks[there]) or table.ranks[there][heads[there]] != other:
                    break
                heads[there] += 1
                awake.append(there)
            heads[rank] += 1
    stuck = [f"rank {r} at {text_of(table.ranks[r][head])}" for r, head in enumerate(heads) if head < len(table.ranks[r])]
    if stuck:
        raise ScheduleError(f"sends and receives wait for each other: {', '.join(stuck)}; bring them into one order on all ranks")


def _other_end(action: Action) -> Action:
    if action.kind.startswith("SEND"):
        return receive_of(action)
    return Action("SEND_F", action.stage - 1, action.microbatch) if action.kind == "RECV_F" else Action("SEND_B", action.stage + 1, action.microbatch)
