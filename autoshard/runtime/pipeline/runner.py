"""Runs this rank's actions of a schedule: computes windows, and sends and receives what crosses stages.

An action of a schedule stands for all values that cross there: RECV_F of a stage for everything that it receives in forward, also of
stages before the previous one, SEND_F for everything that it sends. Where the schedule has no such action (both stages are on one rank, or
stages that are no neighbours), values go right behind the computation, and receives begin right before.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from autoshard.base.graph import BACKWARD, FORWARD, WEIGHT
from autoshard.lower.lower import Port
from autoshard.pipeline.actions import COMPUTE, Action, ActionTable
from autoshard.pipeline.cut import Hop
from autoshard.runtime.pipeline.stage_program import StageProgram
from autoshard.runtime.pipeline.wires import Message, Wires

WINDOWS = {"F": (FORWARD,), "B": (BACKWARD, WEIGHT), "I": (BACKWARD,), "W": (WEIGHT,)}
SENDS = {"F": "SEND_F", "B": "SEND_B", "I": "SEND_B"}
RECEIVES = {"F": "RECV_F", "B": "RECV_B", "I": "RECV_B"}


@dataclass(frozen=True, eq=False)
class Feed:
    """What a step is called with: inputs by micro-batch and name, local as the stages read them; tangents of user outputs and seeds by
    micro-batch."""

    inputs: Sequence[Mapping[str, torch.Tensor]]
    tangents: Sequence[Mapping[object, torch.Tensor]]
    seeds: Sequence[int]


@dataclass(eq=False)
class Run:
    """A step under way: what it has made so far."""

    feed: Feed
    users: dict[tuple[object, int], torch.Tensor] = field(default_factory=dict)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    local: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    outbox: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Runner:
    """`programs`: of the stages on this rank; `rank_of`: coordinate of every stage on the pipeline's axis."""

    programs: Mapping[int, StageProgram]
    table: ActionTable
    wires: Wires

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        return self.table.ranks[self.wires.me]

    @cached_property
    def _listed(self) -> frozenset[Action]:
        return frozenset(self.actions)

    @cached_property
    def forward_only(self) -> tuple[Action, ...]:
        return tuple(a for a in self.actions if a.kind in ("F", "SEND_F", "RECV_F"))

    @cached_property
    def backward_only(self) -> tuple[Action, ...]:
        return tuple(a for a in self.actions if a not in set(self.forward_only))

    def run(self, run: Run, actions: Sequence[Action]) -> None:
        for action in actions:
            if action.kind in COMPUTE:
                self._compute(run, action)
            elif action.kind in ("RECV_F", "RECV_B"):
                self._receive(action.stage, FORWARD if action.kind == "RECV_F" else BACKWARD, _number(action))
            elif action.kind in ("SEND_F", "SEND_B"):
                self._send(run, action.stage, FORWARD if action.kind == "SEND_F" else BACKWARD, _number(action))
        self.wires.flush()

    def _compute(self, run: Run, action: Action) -> None:
        program, m = self.programs[action.stage], _number(action)
        receives, sends = RECEIVES.get(action.kind), SENDS.get(action.kind)
        if receives:
            self._receive(action.stage, FORWARD if action.kind == "F" else BACKWARD, m)  # what is posted already stays
        for window in WINDOWS[action.kind]:
            program.run(window, m, lambda port: self._given(run, program, port, m), lambda port, value: self._take(run, port, value, m))
        if sends and Action(sends, action.stage, m) not in self._listed:  # type: ignore[arg-type]
            self._send(run, action.stage, FORWARD if action.kind == "F" else BACKWARD, m)

    def _given(self, run: Run, program: StageProgram, port: Port, m: int) -> object:
        if port.kind == "seed":
            return run.feed.seeds[m]
        name = str(port.name)
        if name.startswith("recv:"):
            hop = program.stage.received(name)
            if self._is_here(hop):
                return run.local.pop((hop.name, m))
            return self.wires.take(self._message(hop, m))
        return run.feed.inputs[m][name] if port.kind == "input" else run.feed.tangents[m][port.name]

    def _take(self, run: Run, port: Port, value: torch.Tensor, m: int) -> None:
        if port.kind == "send":
            run.outbox[port.name, m] = value
        elif port.kind == "user":
            run.users[port.name, m] = value
        else:
            self._add(run, port.name, value)

    def _add(self, run: Run, name: str, value: torch.Tensor) -> None:
        """Gradients over micro-batches. The first may share memory with another output, a sum of two has its own."""
        n = run.counts[name] = run.counts.get(name, 0) + 1
        if n == 1:
            run.grads[name] = value
        elif n == 2:
            run.grads[name] = run.grads[name] + value
        else:
            run.grads[name] += value

    def _receive(self, stage: int, window: str, m: int) -> None:
        program = self.programs[stage]
        for hop in program.stage.receives:
            if hop.window == window and not self._is_here(hop):
                self.wires.post(self._message(hop, m), program.wire_shape(hop), hop.meta.dtype)

    def _send(self, run: Run, stage: int, window: str, m: int) -> None:
        for hop in self.programs[stage].stage.sends:
            if hop.window == window:
                value = run.outbox.pop((hop.name, m))
                if self._is_here(hop):
                    run.local[hop.name, m] = value
                else:
                    self.wires.send(self._message(hop, m), value)

    def _is_here(self, hop: Hop) -> bool:
        return self.table.rank_of[hop.source] == self.table.rank_of[hop.target]

    def _message(self, hop: Hop, m: int) -> Message:
        return Message(hop.name, m, self.table.rank_of[hop.source], self.table.rank_of[hop.target], hop.window)


def _number(action: Action) -> int:
    assert action.microbatch is not None, f"{action.kind} has a micro-batch"
    return action.microbatch
