"""What the ranks of a pipeline do, as data: one tuple of actions per rank.

    F  forward                  SEND_F  send an activation to the next stage      REDUCE  reduce the gradients of a stage, once a step
    B  whole backward           RECV_F  receive it from the previous stage        UPDATE  the optimizer's update of a stage
    I  backward, inputs only    SEND_B  send a gradient to the previous stage
    W  backward, weights only   RECV_B  receive it from the next stage

Stages are numbered in the order of the model; `rank_of` says where each one is. REDUCE and UPDATE have no micro-batch.
"""
from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE", "UPDATE"]
KINDS: tuple[Kind, ...] = get_args(Kind)
COMPUTE = frozenset({"F", "B", "I", "W"})
TRANSFER = frozenset({"SEND_F", "RECV_F", "SEND_B", "RECV_B"})
ONCE_A_STEP = frozenset({"REDUCE", "UPDATE"})
LIVES: dict[Kind, int] = {"F": 1, "B": -1, "W": -1}
"""How many micro-batches more have saved values behind a computation of a stage."""


@dataclass(frozen=True, slots=True)
class Action:
    kind: Kind
    stage: int
    microbatch: int | None = None


@dataclass(frozen=True)
class ActionTable:
    """`ranks[r]` is what rank r of the pipeline axis does, in order; `rank_of[s]` is the rank of stage s."""

    ranks: tuple[tuple[Action, ...], ...]
    rank_of: tuple[int, ...]
    microbatches: int

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    @cached_property
    def computed(self) -> frozenset[Action]:
        """All computations of all ranks."""
        return frozenset(action for actions in self.ranks for action in actions if action.kind in COMPUTE)

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Per stage, the micro-batches whose saved values are alive at once, at most: from F to the end of B or W."""
        now, most = [0] * self.stages, [1] * self.stages
        for action in (a for actions in self.ranks for a in actions if a.kind in LIVES):
            now[action.stage] += LIVES[action.kind]
            most[action.stage] = max(most[action.stage], now[action.stage])
        return tuple(most)

    @cached_property
    def split_backward(self) -> bool:
        """Whether some backward is in two parts, I and W."""
        return any(action.kind == "W" for actions in self.ranks for action in actions)

    @cached_property
    def digest(self) -> str:
        """The same on all ranks if they have the same table."""
        lines = [" ".join(f"{a.stage}{a.kind}{a.microbatch}" for a in actions) for actions in self.ranks]
        return hashlib.sha256("\n".join([str(self.rank_of), *lines]).encode()).hexdigest()

    def only(self, kinds: Iterable[str]) -> ActionTable:
        """The same table with actions of `kinds` only."""
        wanted = frozenset(kinds)
        return replace(self, ranks=tuple(tuple(a for a in actions if a.kind in wanted) for actions in self.ranks))


def looped(ranks: int, chunks: int) -> tuple[int, ...]:
    """The rank of each stage when the stages go round the ranks `chunks` times: 0 1 2 3 0 1 2 3."""
    return tuple(stage % ranks for stage in range(ranks * chunks))


def folded(ranks: int) -> tuple[int, ...]:
    """The rank of each stage of a V, two stages a rank: 0 1 2 3 3 2 1 0. The first rank has the first stage and the last one."""
    return (*range(ranks), *reversed(range(ranks)))
