"""Activation checkpointing as a graph: backward makes values of forward again instead of keeping them.

A recomputed op is a second op, of the backward phase, in front of the first reader. So it has strategies of its own, its
compute and its redistributions are priced, and it lives in the timeline and runs like any op. What it reads of forward is
saved instead. Random ops are never run again: their numbers are kept.
"""
from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

import torch

from autoshard.graph import Graph, Op, Ref, map_args
from autoshard.plan import AGAIN
from autoshard.recorder import is_random
from autoshard.rules import registry

CHEAP = ("pointwise", "norm", "view", "copy", "reduction")
LEVELS: dict[str, tuple[str, ...]] = {
    "cheap ops": CHEAP,
    "all but the residual stream": (*CHEAP, "matmul", "attention", "conv", "gather"),
}
"""What may be recomputed, by op family: first what costs memory traffic alone, then everything between residual joins."""


def candidates(graph: Graph, families: Collection[str]) -> tuple[str, ...]:
    """Forward ops of these families but random ones and residual joins: sums of two values of the same shape, from which
    whole blocks are recomputed. Only those that backward would have kept anyway are ever run again."""
    return tuple(op.name for op in graph.of_kind("call")
                 if op.phase == "forward" and registry.rule_of(op.target).family in families and not is_random(op.target)
                 and not _is_join(graph, op))


def _is_join(graph: Graph, op: Op) -> bool:
    shapes = {graph.meta(r).shape for r in op.refs}
    made = all(graph.op(r.op).kind == "call" for r in op.refs)
    return op.target is torch.ops.aten.add.Tensor and len(op.refs) == 2 and len(shapes) == 1 and made


def with_recompute(graph: Graph, names: Collection[str]) -> Graph:
    """The graph in which backward runs the ops `names` again where it reads them. The same graph where there are none."""
    return _Rewrite(graph, frozenset(names)).run() if names else graph


@dataclass
class _Rewrite:
    graph: Graph
    names: frozenset[str]
    ops: list[Op] = field(default_factory=list)
    again: dict[str, str] = field(default_factory=dict)

    def run(self) -> Graph:
        for op in self.graph.ops:
            if op.phase == "backward":
                op = self._renamed(op)
            self.ops.append(op)
        return replace(self.graph, ops=tuple(self.ops))

    def _renamed(self, op: Op) -> Op:
        """The op reading recomputed values, which are made in front of it if they are not there yet."""
        for ref in op.refs:
            self._make(ref.op)

        def read(leaf: object) -> object:
            return Ref(self.again[leaf.op], leaf.index) if isinstance(leaf, Ref) and leaf.op in self.again else leaf

        return replace(op, args=map_args(read, op.args), kwargs=tuple((k, map_args(read, v)) for k, v in op.kwargs))

    def _make(self, name: str) -> None:
        """Write the second run of `name`, and of all it needs, deepest first; without recursion, chains may be long."""
        todo = [name] if name in self.names and name not in self.again else []
        while todo:
            op = self.graph.op(todo[-1])
            missing = [r.op for r in op.refs if r.op in self.names and r.op not in self.again]
            if missing:
                todo += missing
                continue
            todo.pop()
            if op.name not in self.again:
                self.ops.append(replace(self._renamed(op), name=op.name + AGAIN, phase="backward"))
                self.again[op.name] = op.name + AGAIN
