"""Stretches of a graph: blocks that stand together, cut out as a stage of their own."""
from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

from autoshard.base.graph import Graph, Op
from autoshard.pipeline.cutting.blocks import Blocks, forward_calls
from autoshard.pipeline.cutting.cut import Stage, one_stage
from autoshard.pipeline.cutting.repeated import repeated_ops
from autoshard.pipeline.cutting.split import split_stage


@dataclass(frozen=True, eq=False)
class Stretches:
    """`split`: with backward in two windows."""

    graph: Graph
    blocks: Blocks
    split: bool

    @cached_property
    def labels(self) -> tuple[Hashable, ...]:
        """What each block does: its ops with their shapes, but for those that every stage repeats. Blocks with equal labels cost the same."""
        found: list[list[Hashable]] = [[] for _ in self.blocks.blocks]
        repeated = repeated_ops(self.graph)
        for op in sorted((op for op in forward_calls(self.graph) if op.name not in repeated), key=lambda op: op.traced_at):
            found[self.blocks.of_op[op.name]].append(self._does(op))
        return tuple(map(tuple, found))

    def _does(self, op: Op) -> Hashable:
        reads = [self.graph.meta(ref) for ref in op.refs]
        return str(op.target), tuple((m.shape, str(m.dtype)) for m in (*reads, *op.outputs) if m is not None)

    def stage(self, first: int, end: int) -> Stage:
        """Blocks first..end-1. Raises UsageError where the graph cannot be cut there."""
        starts = tuple(at for at in (first, end) if 0 < at < len(self.blocks.blocks))
        made = one_stage(self.graph, starts, int(first > 0), self.blocks)
        return split_stage(made) if self.split else made
