"""A schedule made for given seconds and bytes, for stages that are not equal.

A rank that is free takes what is there: a backward before a forward before a weight part, and of forwards that of the deepest stage. A forward
waits while its rank has no bytes for it; then weight parts run, which free some. The same run is tried with a few habits, and the
fastest one is kept.
"""
from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoshard.errors import ScheduleError
from autoshard.pipeline.action_lists.actions import Action, ActionTable
from autoshard.pipeline.action_lists.network import NUMBER, network_of
from autoshard.pipeline.action_lists.play import Seconds, held, play

Floats = Sequence[float] | np.ndarray


@dataclass(frozen=True, eq=False)
class Task:
    """What is to be scheduled. `saved`, `between`: bytes per stage of a micro-batch, as in `held`; `limits`: bytes per rank for them."""

    rank_of: tuple[int, ...]
    microbatches: int
    seconds: Seconds
    saved: Floats
    between: Floats
    limits: Floats
    split_backward: bool = True

    def last(self, action: Action) -> float:
        return float(self.seconds.of[NUMBER[action.kind], action.stage])


@dataclass(frozen=True)
class Habit:
    """`patience`: a weight part is put off if something known to be on its way arrives within this share of its seconds. `ahead`: a stage has at
    most so many micro-batches in flight for each stage from it to the last one; 1 is what 1F1B has. `reserve`: a forward waits until there are
    bytes for the later stages of the same rank too, so that no micro-batch is stuck between them."""

    patience: float
    ahead: float
    reserve: bool


PATIENCE, AHEAD = (0.0, 0.5, 1.0), (1.0, 1.5, 2.0, np.inf)


def list_schedule(task: Task, known: Sequence[ActionTable] = ()) -> ActionTable:
    """The fastest that is found, those of `known` that fit among them. Raises ScheduleError where a rank has too few bytes for one micro-batch."""
    fitting = [table for table in known if (held(table, task.saved, task.between) <= np.asarray(task.limits)).all()]
    table = _fastest(task, fitting, reserve=False) or _fastest(task, fitting, reserve=True)
    if table is None:
        needs = [sum(task.saved[s] for s, r in enumerate(task.rank_of) if r == rank) for rank in range(len(task.limits))]
        short = max(range(len(needs)), key=lambda rank: needs[rank] - task.limits[rank])
        raise ScheduleError(f"rank {short} of the pipeline has {task.limits[short]:.4g} bytes for what forward saves, and one micro-batch needs "
                            f"{needs[short]:.4g}: use more micro-batches, more stages or recomputation")
    return table


def _fastest(task: Task, known: list[ActionTable], reserve: bool) -> ActionTable | None:
    runs = (_Run(task, Habit(patience, ahead, reserve)).table() for patience in PATIENCE for ahead in AHEAD)
    tables = known + [table for table in runs if table is not None]
    return min(tables, key=lambda table: play(network_of(table), task.seconds).makespan, default=None)


@dataclass(eq=False)
class _Run:
    """The state of one run: what has arrived where, and when each rank is free."""

    task: Task
    habit: Habit
    ready: list[list[tuple[float, Action]]] = field(default_factory=list)
    free: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    lists: list[list[Action]] = field(default_factory=list)
    in_flight: dict[int, int] = field(default_factory=dict)
    wires: dict[tuple[int, int], float] = field(default_factory=dict)
    wakes: list[tuple[float, int]] = field(default_factory=list)

    def table(self) -> ActionTable | None:
        """None where the ranks are stuck, each without bytes for what it could do."""
        task, ranks = self.task, 1 + max(self.task.rank_of)
        self.ready, self.lists = [[] for _ in range(ranks)], [[] for _ in range(ranks)]
        self.free, self.held = [0.0] * ranks, [0.0] * ranks
        for m in range(task.microbatches):
            self._arrive(Action("F", 0, m), 0.0)
        while self.wakes:
            now, rank = heapq.heappop(self.wakes)
            if self.free[rank] <= now and (action := self._choose(rank, now)) is not None:
                self._do(rank, action, now)
        whole = task.microbatches * len(task.rank_of) * (3 if task.split_backward else 2)
        if sum(map(len, self.lists)) < whole:
            return None
        return ActionTable(tuple(map(tuple, self.lists)), task.rank_of, task.microbatches)

    def _arrive(self, action: Action, when: float) -> None:
        rank = self.task.rank_of[action.stage]
        self.ready[rank].append((when, action))
        heapq.heappush(self.wakes, (max(when, self.free[rank]), rank))

    def _choose(self, rank: int, now: float) -> Action | None:
        here = [a for when, a in self.ready[rank] if when <= now and (a.kind != "F" or self._has_room(rank, a.stage))]
        action = min(here, key=_priority, default=None)
        if action is None or action.kind != "W":
            return action
        until = now + self.habit.patience * self.task.last(action)
        near = [when for when, a in self.ready[rank] if now < when < until and (a.kind != "F" or self._has_room(rank, a.stage))]
        return None if near else action

    def _has_room(self, rank: int, stage: int) -> bool:
        if self.in_flight.get(stage, 0) >= self.habit.ahead * (len(self.task.rank_of) - stage):
            return False
        later = [s for s, r in enumerate(self.task.rank_of) if r == rank and s >= stage] if self.habit.reserve else [stage]
        return self.held[rank] + sum(self.task.saved[s] for s in later) <= self.task.limits[rank]

    def _do(self, rank: int, action: Action, now: float) -> None:
        self.ready[rank] = [(when, a) for when, a in self.ready[rank] if a != action]
        self.lists[rank].append(action)
        saved, between = self.task.saved[action.stage], self.task.between[action.stage]
        self.held[rank] += {"F": saved, "B": -saved, "I": between - saved, "W": -between}[action.kind]
        self.in_flight[action.stage] = self.in_flight.get(action.stage, 0) + {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
        self.free[rank] = end = now + self.task.last(action)
        heapq.heappush(self.wakes, (end, rank))
        for follower in self._followers(action):
            self._arrive(follower, self._arrival(action, follower, end))

    def _followers(self, action: Action) -> Iterator[Action]:
        """What can be done once `action` has been."""
        stage, m, last = action.stage, action.microbatch, len(self.task.rank_of) - 1
        backward = "I" if self.task.split_backward else "B"
        if action.kind == "F":
            yield Action("F", stage + 1, m) if stage < last else Action(backward, stage, m)
        if action.kind in ("I", "B") and stage > 0:
            yield Action(backward, stage - 1, m)
        if action.kind == "I":
            yield Action("W", stage, m)

    def _arrival(self, action: Action, follower: Action, end: float) -> float:
        sender, receiver = self.task.rank_of[action.stage], self.task.rank_of[follower.stage]
        if sender == receiver:
            return end
        number = NUMBER["SEND_F" if follower.kind == "F" else "SEND_B"]
        wire = (sender * len(self.lists) + receiver, number)
        self.wires[wire] = max(self.wires.get(wire, 0.0), end) + float(self.task.seconds.of[number, action.stage])
        return self.wires[wire]


def _priority(action: Action) -> tuple[int, int, int]:
    return {"I": 0, "B": 0, "F": 1, "W": 2}[action.kind], -action.stage if action.kind == "F" else 0, action.microbatch or 0
