"""Activation checkpointing as a graph: backward recomputes values of forward instead of keeping them.

A recomputed op is a second op, of the backward phase, in front of its first reader. So it has strategies of its own, its
compute and its redistributions are priced, and it lives in the timeline and runs like any op. The values of forward that it
reads are saved. Random ops are never recomputed: their results are kept. Where backward is in two windows, an op runs again in the first of them
that may need it, whatever else runs again, and what the second needs is saved between them.

`with_recompute` gives the program for decided recomputation. `with_sources` gives the program in which recomputation is not decided
yet: backward reads every value of forward through a *recompute source*, an op that either keeps the value or recomputes it.
"""
from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from autoshard.base.graph import BACKWARD, KEPT, LATE, WEIGHT, Graph, Op, Ref
from autoshard.base.plan import RECOMPUTE_SUFFIX
from autoshard.program.tracing.tape import is_random
from autoshard.rules import registry
from autoshard.rules.family import Family


def candidates(graph: Graph, families: Collection[Family] = tuple(Family)) -> tuple[str, ...]:
    """Forward ops of these families that may be recomputed: not random ones and residual joins (sums of two values of the same shape): blocks are
    recomputed from their joins. An op is recomputed only if backward reads its value."""
    return tuple(op.name for op in graph.of_kind("call")
                 if op.phase == "forward" and (family := registry.rule_of(op.target).family).repeatable and family in families
                 and not is_random(op.target) and not _is_join(graph, op))


def _is_join(graph: Graph, op: Op) -> bool:
    shapes = {graph.meta(r).shape for r in op.refs}
    made = all(graph.op(r.op).kind == "call" for r in op.refs)
    return op.target is torch.ops.aten.add.Tensor and len(op.refs) == 2 and len(shapes) == 1 and made


def is_view(op: Op) -> bool:
    """Whether the op's value lies in the buffer of what it reads."""
    return registry.is_view(op) and len(op.refs) == 1


def with_recompute(graph: Graph, names: Collection[str]) -> Graph:
    """The graph in which backward recomputes the ops `names` where it reads them. Without names, the same graph."""
    return _Rewrite(graph, frozenset(names), frozenset(names)).run() if names else graph


def with_sources(graph: Graph) -> Graph:
    """The graph in which backward reads every value that forward computes through a recompute source.

    A source has the op's name with the suffix `RECOMPUTE_SUFFIX`. Its arguments are those of the op, read through sources too, to recompute
    it; a source of an op that is never recomputed has none. The keyword `KEPT` holds the op's values, to keep them; a view
    has none, since the value it views is kept."""
    forward = frozenset(op.name for op in graph.of_kind("call") if op.phase == "forward")
    return _Sources(graph, forward, frozenset(candidates(graph))).run()


def is_source(op: Op) -> bool:
    """Whether the op is a recompute source: it gives backward a value of forward, kept or recomputed."""
    return op.kind == "call" and any(key == KEPT for key, _ in op.kwargs)


@dataclass
class _Rewrite:
    """Backward reads `names` through second ops. Those of `runs` have the arguments of the first op."""

    graph: Graph
    names: frozenset[str]
    runs: frozenset[str]
    ops: list[Op] = field(default_factory=list)
    again: dict[str, str] = field(default_factory=dict)

    def run(self) -> Graph:
        for op in self.graph.ops:
            if op.phase in LATE:
                for ref in op.refs:
                    self._make(ref.op)
                op = self._renamed(op)
            self.ops.append(op)
        order = self.graph.window_index
        if WEIGHT in order:  # what runs again for it may belong to the window before
            self.ops.sort(key=lambda op: (order[op.phase], op.kind == "output"))
        return replace(self.graph, ops=tuple(self.ops))

    @cached_property
    def first_needs(self) -> frozenset[str]:
        """Ops of forward whose values the first part of backward may need, whatever runs again."""
        again = frozenset(candidates(self.graph))
        found: set[str] = set()
        todo = [r.op for op in self.graph.ops if op.phase == BACKWARD for r in op.refs]
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo += [r.op for r in self.graph.op(name).refs] if name in again else []
        return frozenset(found)

    def _renamed(self, op: Op) -> Op:
        """The op, reading second ops where they exist."""
        return op.reading(lambda ref: replace(ref, op=self.again.get(ref.op, ref.op)))

    def _make(self, name: str) -> None:
        """Write the second op of `name`, and all it needs, deepest first; without recursion, chains may be long."""
        todo = [name] if name in self.names and name not in self.again else []
        while todo:
            op = self.graph.op(todo[-1])
            missing = [r.op for r in op.refs if r.op in self.names and r.op not in self.again] if op.name in self.runs else []
            if missing:
                todo += missing
                continue
            todo.pop()
            if op.name not in self.again:
                self.ops.append(self._second(op))
                self.again[op.name] = op.name + RECOMPUTE_SUFFIX

    def _second(self, op: Op) -> Op:
        return replace(self._renamed(op), name=op.name + RECOMPUTE_SUFFIX, phase=BACKWARD if op.name in self.first_needs else WEIGHT)


class _Sources(_Rewrite):
    def _second(self, op: Op) -> Op:
        made = super()._second(op if op.name in self.runs else replace(op, args=(), kwargs=()))
        values = () if is_view(op) else tuple(Ref(op.name, k) for k, meta in enumerate(op.outputs) if meta is not None)
        return replace(made, kwargs=(*made.kwargs, (KEPT, values)))
