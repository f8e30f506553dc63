"""A graph with micro-batches on one device: every micro-batch op by op, and what comes of all of them."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autoshard.base.graph import Graph, Op
from autoshard.base.roles import Role
from autoshard.base.windows import is_accumulator
from autoshard.pipeline.microbatches.results import Results, pieces_of
from autoshard.program.calling import Traced
from autoshard.program.interpret import Instead, results_of, values_of


def key_of(graph: Graph, op: str, m: int) -> str:
    """What an op's values of one micro-batch are called; without micro-batches, its name."""
    return op if graph.microbatches == 1 else f"{op}@{m}"


def op_of(key: str) -> str:
    """The op of a `key_of`."""
    return key.partition("@")[0]


def loss_of(graph: Graph) -> int:
    """Which user output is differentiated."""
    (loss,) = (op.target for op in graph.of_kind("tangent"))
    return int(loss)


@dataclass(eq=False)
class OnOneDevice:
    """One step. `state` is written where the model writes its buffers; `values` as `key_of` names them."""

    traced: Traced
    state: dict[str, torch.Tensor]
    results: Results = field(init=False)
    values: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    grads: Mapping[str, torch.Tensor] = field(default_factory=dict)
    mutations: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.results = Results(self.traced.graph)

    def run(self, tensors: Sequence[torch.Tensor], instead: Instead) -> None:
        """`instead(op, inputs, micro-batch)` may answer for an op."""
        graph = self.traced.graph
        for m in range(graph.microbatches):
            found = values_of(self.traced, self.state, pieces_of(graph, tensors, m), lambda values, m=m: self._tangents(values, m),
                              lambda op, inputs, m=m: self._sum(op, inputs) if is_accumulator(op) else instead(op, inputs, m))
            done = results_of(self.traced, found)
            self.grads, self.mutations = done.grads, done.mutations
            self.state.update(done.mutations)
            self.values.update({key_of(graph, name, m): value for name, value in found.items()})
        if (factor := self.results.factor) is not None:
            self.grads = {name: (g * factor).to(g.dtype) for name, g in self.grads.items()}

    def _tangents(self, values: Mapping[str, tuple[Any, ...]], m: int) -> dict[int, torch.Tensor]:
        graph = self.traced.graph
        self.results.add(m, [values[op.refs[0].op][op.refs[0].index] for op in graph.outputs(Role.USER).values()])
        return {loss_of(graph): self.results.tangent(loss_of(graph))}

    def _sum(self, op: Op, inputs: tuple[Any, ...]) -> tuple[torch.Tensor]:
        """The gradient added to those of the micro-batches before; one of no weight counts nothing."""
        before = self.sums.get(op.name, torch.zeros_like(inputs[0]))
        self.sums[op.name] = before + inputs[0] if self.results.counts else before
        return (self.sums[op.name],)
