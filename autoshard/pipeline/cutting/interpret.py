"""Runs the stages of a cut in one process, op by op, micro-batch by micro-batch: the reference of everything that runs them for real."""
from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autoshard.base.graph import BACKWARD, FORWARD, WEIGHT, Op
from autoshard.base.windows import END, ONCE, START, is_accumulator
from autoshard.pipeline.cutting.cut import Cut
from autoshard.program.calling import as_stored
from autoshard.program.interpret import call_op


@dataclass(frozen=True, eq=False)
class StepResult:
    """`users[m][i]`: user output i of micro-batch m; `grads`: summed over micro-batches and stages; `mutations`: buffers at the end."""

    users: tuple[Mapping[str, torch.Tensor], ...]
    grads: Mapping[str, torch.Tensor]
    mutations: Mapping[str, torch.Tensor]


@dataclass(eq=False)
class StagePlayer:
    """The stages with their values. `tangents[m]`: of the user outputs of micro-batch m; by default they are ones over M."""

    cut: Cut
    state: dict[str, torch.Tensor]
    inputs: Sequence[Sequence[torch.Tensor]]
    tangents: Sequence[Mapping[Any, torch.Tensor]] = ()
    wires: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    users: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    written: dict[str, torch.Tensor] = field(default_factory=dict)
    _values: dict[tuple[int, int], dict[str, tuple[Any, ...]]] = field(default_factory=dict)
    _shared: dict[int, dict[str, tuple[Any, ...]]] = field(default_factory=dict)

    def run(self, stage: int, window: str, m: int) -> None:
        """One window of one stage for micro-batch m: an action F, I or W of a schedule; B is I, then W. What runs once a step, at the start
        and at the end, has no micro-batch: m = -1."""
        graph = self.cut.stages[stage].graph
        shared = self._shared.setdefault(stage, {})
        values = ChainMap(shared if window in ONCE else self._values.setdefault((stage, m), {}), shared)
        for op in graph.ops:
            if op.phase != window:
                continue
            if op.kind == "call" and is_accumulator(op):
                value = values[op.refs[0].op][op.refs[0].index]
                shared[op.name] = (shared[op.name][0] + value if op.name in shared else value,)
            elif op.kind == "call":
                values[op.name] = call_op(op, values, torch.device("cpu"))
            elif op.kind == "output":
                self._hand_out(op, m, values[op.refs[0].op][op.refs[0].index])
            else:
                values[op.name] = (self._given(op, m),)

    def _given(self, op: Op, m: int) -> torch.Tensor:
        if op.is_port:
            return self.wires.pop((op.target.partition(":")[2], m))
        if op.kind == "input":
            return as_stored(self.inputs[m][int(op.target.removeprefix("input:"))])
        if op.kind == "tangent":
            meta = op.outputs[0]
            assert meta is not None, f"{op.name} has no shape"
            given = self.tangents[m].get(op.target) if self.tangents else None
            return torch.full(meta.shape, 1.0 / len(self.inputs), dtype=meta.dtype) if given is None else as_stored(given)
        return as_stored(self.state[op.target])

    def _hand_out(self, op: Op, m: int, value: torch.Tensor) -> None:
        kind, name = op.target.role, str(op.target.name)
        if kind == "send":
            self.wires[name, m] = value
        elif kind == "user":
            self.users.setdefault(m, {})[name] = value
        elif kind == "mutation":
            self.written[name] = self.state[name] = value
        else:
            self.grads[name] = self.grads[name] + value if name in self.grads else value

    def step(self) -> StepResult:
        """Forward of all stages and micro-batches, then backward: GPipe's order."""
        order, batches = range(len(self.cut.stages)), range(len(self.inputs))
        with torch.no_grad():
            for s in order:
                self.run(s, START, -1)
            for m in batches:
                for s in order:
                    self.run(s, FORWARD, m)
            for m in batches:
                for s in reversed(order):
                    for window in (BACKWARD, WEIGHT):
                        self.run(s, window, m)
            for s in order:
                self.run(s, END, -1)
        return self.result()

    def result(self) -> StepResult:
        return StepResult(tuple(self.users[m] for m in range(len(self.inputs))), dict(self.grads), dict(self.written))
