"""Prices of stages of a graph by the ordinary search."""
from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autoshard.base.graph import BACKWARD, FORWARD, WEIGHT, Graph, Op
from autoshard.base.plan import Plan
from autoshard.base.windows import ONCE
from autoshard.cost.cluster import AxisLink
from autoshard.pipeline.cutting.blocks import Blocks, forward_calls
from autoshard.pipeline.cutting.cut import Stage, cut
from autoshard.pipeline.cutting.repeated import repeated_ops
from autoshard.pipeline.cutting.split import split_backward
from autoshard.pipeline.plan_stages import PlanStage, wire_seconds
from autoshard.pipeline.shapes.price import StagePrice, chain_from
from autoshard.search.partition import Chain

STORED = ("parameters", "gradients", "optimizer", "buffers", "inputs")
WORKING = ("temporaries", "outputs")


@dataclass(frozen=True, eq=False)
class GraphPricer:
    """Plans stretches of a graph as stages of their own, each with free layouts at its ends, for one micro-batch in flight."""

    graph: Graph
    blocks: Blocks
    plan_stage: PlanStage
    wire: AxisLink
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

    def chain(self) -> Chain:
        """The chain of all stages; one without ops is none."""
        made = chain_from(self.labels, self.price)
        before = np.concatenate([[0], np.cumsum([len(label) for label in self.labels])])
        return replace(made, forward=np.where(before[None, :] > before[:, None], made.forward, np.inf))

    def price(self, first: int, end: int) -> StagePrice:
        """Of blocks first..end-1. Raises UsageError where the graph cannot be cut there, and InfeasibleError."""
        stage = self.stage(first, end)
        if not stage.graph.of_kind("call"):  # all its ops run in blocks that read them
            return StagePrice(0.0, 0.0)
        return price_of(stage, self.plan_stage(stage.graph, {}, 1), self.wire)

    def stage(self, first: int, end: int) -> Stage:
        made = cut(self.graph, tuple(at for at in (first, end) if 0 < at < len(self.blocks.blocks)), self.blocks)
        return (split_backward(made) if self.split else made).stages[int(first > 0)]


def price_of(stage: Stage, plan: Plan, wire: AxisLink) -> StagePrice:
    """What a plan of a stage's graph says of one micro-batch. Its search paid for both ends of what crosses; that is the wire's here."""
    (own,), m = plan.stages, stage.graph.microbatches
    windows = {name: float(seconds) / m - _paid(stage, plan, wire, name) for name, seconds in own.windows.items() if name not in ONCE}
    memory = {name: float(value or 0.0) for name, value in own.memory.items() if name in (*STORED, *WORKING, "saved")}
    saved = memory.get("saved", 0.0) / max(own.in_flight, 1)
    return StagePrice(
        *(max(0.0, windows.get(name, 0.0)) for name in (FORWARD, BACKWARD, WEIGHT)),
        once=sum(float(seconds) for name, seconds in own.windows.items() if name in ONCE), update=float(own.once_s),
        stored=sum(memory.get(name, 0.0) for name in STORED), peak=sum(memory.get(name, 0.0) for name in WORKING), saved=saved, between=saved,
        wire_out=wire_seconds([h for h in stage.sends if h.window == FORWARD], plan, wire, "send"),
        wire_in=wire_seconds([h for h in stage.sends if h.window == BACKWARD], plan, wire, "send"))


def _paid(stage: Stage, plan: Plan, wire: AxisLink, window: str) -> float:
    sends = [h for h in stage.sends if stage.graph.op(h.send).phase == window]
    receives = [h for h in stage.receives if stage.graph.op(h.recv).phase == window]
    return wire_seconds(sends, plan, wire, "send") + wire_seconds(receives, plan, wire, "recv")
