"""Runs this rank's turns of a step (`pipeline/turns.py`): computes windows, and sends and receives what crosses stages."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import Any

import torch

from autoshard.base.graph import BACKWARD, FORWARD
from autoshard.base.turns import HERE, Turn
from autoshard.base.windows import ONCE
from autoshard.pipeline.action_lists.actions import ActionTable
from autoshard.pipeline.cutting.cut import Hop
from autoshard.runtime.microbatches import Micro
from autoshard.runtime.params.stored import Stored
from autoshard.runtime.pipeline.stage_program import StageProgram
from autoshard.runtime.pipeline.wires import Message, Wires

RAN: ContextVar[Callable[[Turn, float, float, float], None] | None] = ContextVar("ran", default=None)
"""Told of every window that was run: its turn, when the rank came to it, when its values were there, and when it was done (`perf_counter`)."""


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
        key, told, came = (turn.stage, turn.microbatch), RAN.get(), perf_counter()
        if key not in run.micros:
            run.micros[key] = run.micro(*key)
        self._arrive(run, run.micros[key], turn)
        there = perf_counter()
        self._window(run, turn.stage, turn.window, turn.microbatch)
        if turn.window == self._last[turn.stage]:
            del run.micros[key]
        if told is not None:
            told(turn, came, there, perf_counter())

    def _window(self, run: Run, stage: int, window: str, m: int) -> None:
        program, micro = self.programs[stage], run.micros[stage, m]
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

    @cached_property
    def _arrivals(self) -> dict[tuple[int, str], tuple[tuple[str, str, Hop], ...]]:
        """What the windows of stages take of other stages: "input" or "tangent", the port, its hop."""
        return {(s, window): tuple((port.kind, port.name, program.stage.received(port.name)) for port in function.takes
                                   if port.kind in ("input", "tangent") and str(port.name).startswith("recv:"))
                for s, program in self.programs.items() for window, function in program.windows.functions.items()}

    def _arrive(self, run: Run, micro: Micro, turn: Turn) -> None:
        """Wait for what the window takes of other stages."""
        for kind, port, hop in self._arrivals[turn.stage, turn.window]:
            value = run.local.pop((hop.name, turn.microbatch)) if self._is_here(hop) else self.wires.take(self._message(hop, turn.microbatch))
            given: dict[Any, torch.Tensor] = micro.inputs if kind == "input" else micro.tangents
            given[port] = value

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
            is_part = value.untyped_storage().nbytes() > value.nbytes  # and would keep the whole tensor; off a wire nothing does
            run.local[turn.value, turn.microbatch] = value.clone(memory_format=torch.contiguous_format) if is_part else value.contiguous()
        else:
            self.wires.send(self._message(self.programs[turn.stage].stage.sent(f"send:{turn.value}"), turn.microbatch), value)

    def _is_here(self, hop: Hop) -> bool:
        return self.table.rank_of[hop.source] == self.table.rank_of[hop.target]

    def _message(self, hop: Hop, m: int) -> Message:
        return Message(hop.name, m, self.table.rank_of[hop.source], self.table.rank_of[hop.target], hop.channel)
