"""Runs this rank's actions of a schedule: computes windows, and sends and receives what crosses stages.

An action of a schedule stands for all values that cross there: RECV_F of a stage for everything that it receives in forward, also of
stages before the previous one, SEND_F for everything that it sends. Where the schedule has no such action (both stages are on one rank, or
stages that are no neighbours), values go right behind the computation, and receives begin right before.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from autoshard.base.graph import BACKWARD, FORWARD, WEIGHT
from autoshard.lower.lower import Port
from autoshard.pipeline.action_lists.actions import COMPUTE, Action, ActionTable
from autoshard.pipeline.cutting.cut import Hop
from autoshard.runtime.microbatches import Micro
from autoshard.runtime.params.stored import Stored
from autoshard.runtime.pipeline.stage_program import StageProgram
from autoshard.runtime.pipeline.wires import Message, Wires

WINDOWS = {"F": (FORWARD,), "B": (BACKWARD, WEIGHT), "I": (BACKWARD,), "W": (WEIGHT,)}
SENDS = {"F": "SEND_F", "B": "SEND_B", "I": "SEND_B"}
RECEIVES = {"F": "RECV_F", "B": "RECV_B", "I": "RECV_B"}
FORWARDS = ("F", "SEND_F", "RECV_F")


@dataclass(eq=False)
class Run:
    """A step under way. `micro`: a new micro-batch of a stage, with its inputs and seed; `results`: takes the user outputs of a micro-batch and
    returns its tangents, None for one that counts nothing."""

    micro: Callable[[int, int], Micro]
    results: Callable[[int, dict[Any, torch.Tensor]], Mapping[Any, torch.Tensor] | None]
    micros: dict[tuple[int, int], Micro] = field(default_factory=dict)
    empty: set[int] = field(default_factory=set)
    grads: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    local: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    outbox: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Runner:
    """`programs`: of the stages on this rank."""

    programs: Mapping[int, StageProgram]
    table: ActionTable
    wires: Wires
    stored: Stored

    @cached_property
    def _listed(self) -> frozenset[Action]:
        return frozenset(self.table.ranks[self.wires.me])

    def run(self, run: Run, training: bool = True) -> None:
        """A whole step; without `training` its forwards alone."""
        for program in self.programs.values():
            program.begin()
        for action in self.table.ranks[self.wires.me]:
            if training or action.kind in FORWARDS:
                self._act(run, action)
        self.wires.flush()
        for stage, program in self.programs.items():
            run.grads.update(((stage, name), g) for name, g in program.finish().items())

    def _act(self, run: Run, action: Action) -> None:
        window = FORWARD if action.kind in FORWARDS else BACKWARD
        if action.kind in COMPUTE:
            self._compute(run, action, window)
        elif action.kind.startswith("RECV"):
            self._receive(action.stage, window, _number(action))
        elif action.kind.startswith("SEND"):
            self._send(run, action.stage, window, _number(action))

    def _compute(self, run: Run, action: Action, crossing: str) -> None:
        m, stage = _number(action), action.stage
        if action.kind in RECEIVES:
            self._receive(stage, crossing, m)  # what is posted already stays
        if action.kind == "F":
            run.micros[stage, m] = run.micro(stage, m)
        for window in WINDOWS[action.kind]:
            self._window(run, stage, window, m)
        if action.kind in ("B", "W"):
            del run.micros[stage, m]
        if action.kind in SENDS and Action(SENDS[action.kind], stage, m) not in self._listed:  # type: ignore[arg-type]
            self._send(run, stage, crossing, m)

    def _window(self, run: Run, stage: int, window: str, m: int) -> None:
        program, micro = self.programs[stage], run.micros[stage, m]
        function = program.windows.functions.get(window)
        if function is None:
            return
        self._arrive(run, program, micro, function.takes, m)
        if window != FORWARD and m in run.empty and stage == self.table.stages - 1:
            return self._nothing(run, program, window, m)
        out = program.windows.run(window, micro)
        users = {port.name: value for port, value in out.items() if port.kind == "user"}
        for port, value in out.items():
            if port.kind == "send":
                run.outbox[port.name, m] = value
            elif port.kind == "mutation":
                self.stored.write(port.name, value)
            elif port.kind == "grad":
                run.grads[stage, port.name] = value
        if window == FORWARD:
            micro.inputs = {}
        if users:
            tangents = run.results(m, users)
            micro.tangents.update(tangents or {})
            if tangents is None:
                run.empty.add(m)

    def _arrive(self, run: Run, program: StageProgram, micro: Micro, takes: tuple[Port, ...], m: int) -> None:
        """Wait for what the window takes of other stages."""
        for port in takes:
            name = str(port.name)
            if port.kind in ("input", "tangent") and name.startswith("recv:"):
                hop = program.stage.received(name)
                value = run.local.pop((hop.name, m)) if self._is_here(hop) else self.wires.take(self._message(hop, m))
                micro.inputs, micro.tangents = ({**micro.inputs, name: value}, micro.tangents) if port.kind == "input" else (
                    micro.inputs, {**micro.tangents, name: value})  # type: ignore[dict-item]

    def _nothing(self, run: Run, program: StageProgram, window: str, m: int) -> None:
        """The backward of a micro-batch that counts nothing (all its targets ignored): a mean of nothing has no gradient, its part of the
        batch's is zero."""
        for hop in program.stage.sends:
            if hop.window == window == BACKWARD:
                run.outbox[hop.name, m] = torch.zeros(program.wire_shape(hop), dtype=hop.meta.dtype, device=self.wires.device)

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
