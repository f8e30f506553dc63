"""Runs this rank's turns of a step (`pipeline/turns.py`): computes windows, and sends and receives what crosses stages."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from autoshard.base.graph import BACKWARD, FORWARD
from autoshard.base.turns import HERE, Turn
from autoshard.base.windows import ONCE
from autoshard.lower.lower import Port
from autoshard.pipeline.action_lists.actions import ActionTable
from autoshard.pipeline.cutting.cut import Hop
from autoshard.runtime.microbatches import Micro
from autoshard.runtime.params.stored import Stored
from autoshard.runtime.pipeline.stage_program import StageProgram
from autoshard.runtime.pipeline.wires import Message, Wires


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
    """`programs`: of the stages on this rank; `turns`: what it does in a step."""

    programs: Mapping[int, StageProgram]
    table: ActionTable
    turns: tuple[Turn, ...]
    wires: Wires
    stored: Stored

    @cached_property
    def _last(self) -> dict[int, str]:
        """The window behind which a stage needs nothing of a micro-batch any more."""
        return {s: [w.name for w in program.stage.graph.windows if w.name not in ONCE][-1] for s, program in self.programs.items()}

    def run(self, run: Run, training: bool = True) -> None:
        """A whole step; without `training` its forwards alone."""
        for program in self.programs.values():
            program.begin()
        act = {"post": self._post, "run": self._compute, "send": self._send}
        for turn in self.turns:
            if training or turn.window == FORWARD:
                act[turn.kind](run, turn)
        self.wires.flush()
        for stage, program in self.programs.items():
            run.grads.update(((stage, name), g) for name, g in program.finish().items())

    def _compute(self, run: Run, turn: Turn) -> None:
        key = turn.stage, turn.microbatch
        if key not in run.micros:
            run.micros[key] = run.micro(*key)
        self._window(run, turn.stage, turn.window, turn.microbatch)
        if turn.window == self._last[turn.stage]:
            del run.micros[key]

    def _window(self, run: Run, stage: int, window: str, m: int) -> None:
        program, micro = self.programs[stage], run.micros[stage, m]
        function = program.windows.functions[window]
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

    def _post(self, run: Run, turn: Turn) -> None:
        program = self.programs[turn.stage]
        hop = program.stage.received(f"recv:{turn.value}")
        self.wires.post(self._message(hop, turn.microbatch), program.wire_shape(hop), hop.meta.dtype)

    def _send(self, run: Run, turn: Turn) -> None:
        value = run.outbox.pop((turn.value, turn.microbatch))
        if turn.other == HERE:
            run.local[turn.value, turn.microbatch] = value
        else:
            self.wires.send(self._message(self.programs[turn.stage].stage.sent(f"send:{turn.value}"), turn.microbatch), value)

    def _is_here(self, hop: Hop) -> bool:
        return self.table.rank_of[hop.source] == self.table.rank_of[hop.target]

    def _message(self, hop: Hop, m: int) -> Message:
        return Message(hop.name, m, self.table.rank_of[hop.source], self.table.rank_of[hop.target], hop.window)
