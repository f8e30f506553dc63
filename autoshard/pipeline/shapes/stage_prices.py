"""Prices of stages of a graph by the ordinary search."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from autoshard.base.graph import BACKWARD, FORWARD, WEIGHT
from autoshard.base.plan import Moment, Plan
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
    stored = sum(turn.by_category[name] for name in STORED) + always
    saved, between = (max(0, kept - always) for kept in _kept(own.timeline))
    beside = {FORWARD: saved, WEIGHT: between}  # while forward runs, and the weight part; else as much as before or behind the input part
    return StagePrice(
        *(max(0.0, windows.get(name, 0.0)) for name in (FORWARD, BACKWARD, WEIGHT)),
        once=sum(float(seconds) for name, seconds in own.windows.items() if name in ONCE), update=float(own.once_s),
        stored=float(stored), peak=float(max(0, *(m.total - stored - beside.get(m.window, max(saved, between)) for m in own.timeline))),
        saved=float(saved), between=float(between),
        wire_out=wire_seconds([h for h in stage.sends if h.window == FORWARD], plan, wire, "send"),
        wire_in=wire_seconds([h for h in stage.sends if h.window == BACKWARD], plan, wire, "send"))


def _kept(timeline: Sequence[Moment]) -> tuple[int, int]:
    """Bytes that are kept behind forward, and behind the input part of backward: no more than at the end of a window, nor than at the begin of the
    next one. Where no window makes gradients for other stages, the weight part is what is waited for all the time."""
    ends = [(before, after) for before, after in pairwise(timeline) if before.window != after.window]
    found = {before.window: min(before.by_category["saved"], after.by_category["saved"]) for before, after in ends}
    saved = found.get(FORWARD, 0)
    return saved, found.get(BACKWARD, saved)


def _paid(stage: Stage, plan: Plan, wire: AxisLink, window: str) -> float:
    sends = [h for h in stage.sends if stage.graph.op(h.send).phase == window]
    receives = [h for h in stage.receives if stage.graph.op(h.recv).phase == window]
    return wire_seconds(sends, plan, wire, "send") + wire_seconds(receives, plan, wire, "recv")
