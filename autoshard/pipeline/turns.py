"""A rank's actions as turns: what the runner executes and the timeline of memory is played by.

RECV_F of a stage stands for everything that it receives in forward, also of stages before the previous one, SEND_F for everything that it
sends. Where the schedule has no such action (both stages are on one rank, or they are no neighbours), values go right behind the
computation, and receives begin right before it.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence

from autoshard.base.graph import BACKWARD, FORWARD, WEIGHT
from autoshard.base.turns import HERE, Turn
from autoshard.pipeline.action_lists.actions import COMPUTE, Action, ActionTable
from autoshard.pipeline.cutting.cut import Hop, Stage

WINDOWS = {"F": (FORWARD,), "B": (BACKWARD, WEIGHT), "I": (BACKWARD,), "W": (WEIGHT,)}
SENDS = {"F": "SEND_F", "B": "SEND_B", "I": "SEND_B"}
CROSSING = {"F": FORWARD, "SEND_F": FORWARD, "RECV_F": FORWARD, "B": BACKWARD, "I": BACKWARD, "SEND_B": BACKWARD, "RECV_B": BACKWARD}


def turns_of(table: ActionTable, stages: Sequence[Stage], rank: int) -> tuple[Turn, ...]:
    """Of a rank; `table` has sends and receives."""
    listed, posted = frozenset(table.ranks[rank]), set[tuple[str, int]]()

    def other(stage: int) -> int:
        return HERE if table.rank_of[stage] == rank else table.rank_of[stage]

    def receives(action: Action, m: int) -> Iterator[Turn]:
        for hop in _crossing(stages[action.stage].receives, action):
            if other(hop.source) != HERE and (hop.name, m) not in posted:
                posted.add((hop.name, m))
                yield Turn("post", action.stage, hop.window, m, hop.name, other(hop.source), skips=hop.skips)

    def sends(action: Action, m: int) -> Iterator[Turn]:
        return (Turn("send", action.stage, hop.window, m, hop.name, other(hop.target), skips=hop.skips)
                for hop in _crossing(stages[action.stage].sends, action))

    def runs(action: Action, m: int) -> Iterator[Turn]:
        stage = stages[action.stage]
        for window in WINDOWS[action.kind]:
            if window in stage.graph.window_index:
                takes = tuple(hop.name for hop in stage.receives if stage.graph.op(hop.recv).phase == window)
                yield Turn("run", action.stage, window, m, takes=takes)

    def turns() -> Iterator[Turn]:
        for action in table.ranks[rank]:
            m = action.microbatch
            if m is None:
                continue
            if action.kind.startswith("RECV") or action.kind in COMPUTE:
                yield from receives(action, m)
            if action.kind in COMPUTE:
                yield from runs(action, m)
            if action.kind.startswith("SEND") or action.kind in SENDS and Action(SENDS[action.kind], action.stage, m) not in listed:  # type: ignore[arg-type]
                yield from sends(action, m)

    return tuple(turns())


def _crossing(hops: Sequence[Hop], action: Action) -> Iterator[Hop]:
    return (hop for hop in hops if hop.window == CROSSING.get(action.kind))
