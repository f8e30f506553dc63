"""Prices of stages of a graph by the ordinary search."""
from __future__ import annotations

from dataclasses import dataclass

from autoshard.base.graph import BACKWARD, FORWARD, WEIGHT
from autoshard.base.plan import Plan
from autoshard.base.windows import ONCE, START
from autoshard.cost.cluster import AxisLink
from autoshard.pipeline.cutting.cut import Stage
from autoshard.pipeline.cutting.stretches import Stretches
from autoshard.pipeline.plan_stages import PlanStage, wire_seconds
from autoshard.pipeline.shapes.price import StagePrice, chain_from
from autoshard.search.partition import Chain

STORED = ("parameters", "gradients", "optimizer", "buffers", "inputs")


@dataclass(frozen=True, eq=False)
class GraphPricer:
    """Plans stretches of a graph as stages of their own, each with free layouts at its ends, for one micro-batch in flight."""

    stretches: Stretches
    plan_stage: PlanStage
    wire: AxisLink

    def chain(self) -> Chain:
        return chain_from(self.stretches.labels, self.price)

    def price(self, first: int, end: int) -> StagePrice:
        """Of blocks first..end-1. Raises UsageError where the graph cannot be cut there, and InfeasibleError."""
        stage = self.stretches.stage(first, end)
        if not stage.graph.of_kind("call"):  # all its ops run in blocks that read them
            return StagePrice(0.0, 0.0)
        return price_of(stage, self.plan_stage(stage.graph, {}, 1), self.wire)


def price_of(stage: Stage, plan: Plan, wire: AxisLink) -> StagePrice:
    """What a plan of a stage's graph says of one micro-batch. Its search paid for both ends of what crosses; that is the wire's here."""
    (own,), m = plan.stages, stage.graph.microbatches
    windows = {name: float(seconds) / m - _paid(stage, plan, wire, name) for name, seconds in own.windows.items() if name not in ONCE}
    turn = max(own.timeline, key=lambda moment: moment.by_category["saved"])  # the peak may be elsewhere, at the update for one
    always = max((moment.by_category["saved"] for moment in own.timeline if moment.window == START), default=0)  # held parameters, however many fly
    stored, held = sum(turn.by_category[name] for name in STORED) + always, turn.by_category["saved"] - always
    return StagePrice(
        *(max(0.0, windows.get(name, 0.0)) for name in (FORWARD, BACKWARD, WEIGHT)),
        once=sum(float(seconds) for name, seconds in own.windows.items() if name in ONCE), update=float(own.once_s),
        stored=float(stored), peak=max(0.0, float(max(moment.total for moment in own.timeline) - stored - held)),
        saved=float(held), between=float(held),
        wire_out=wire_seconds([h for h in stage.sends if h.window == FORWARD], plan, wire, "send"),
        wire_in=wire_seconds([h for h in stage.sends if h.window == BACKWARD], plan, wire, "send"))


def _paid(stage: Stage, plan: Plan, wire: AxisLink, window: str) -> float:
    sends = [h for h in stage.sends if stage.graph.op(h.send).phase == window]
    receives = [h for h in stage.receives if stage.graph.op(h.recv).phase == window]
    return wire_seconds(sends, plan, wire, "send") + wire_seconds(receives, plan, wire, "recv")
