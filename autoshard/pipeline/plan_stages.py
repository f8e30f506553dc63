"""Plans every stage of a pipeline by the ordinary search, and puts the plans together into one, priced by playing the schedule."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autoshard import collectives
from autoshard.base.graph import BACKWARD, FORWARD, WEIGHT, Graph
from autoshard.base.plan import Plan, StagePlan
from autoshard.base.spec import Spec
from autoshard.base.windows import ONCE
from autoshard.cost.cluster import AxisLink
from autoshard.cost.memory import value_bytes
from autoshard.errors import InfeasibleError
from autoshard.pipeline.action_lists.network import network_of
from autoshard.pipeline.action_lists.play import Playback, Seconds, held, play
from autoshard.pipeline.cutting.cut import Hop, Stage
from autoshard.pipeline.cutting.layout import layout_of
from autoshard.pipeline.pipelined import Pipelined

PlanStage = Callable[[Graph, Mapping[str, Spec], int], Plan]
"""(graph of a stage, placements by name that are fixed, micro-batches in flight) -> its plan."""


def plan_stages(made: Pipelined, fixed: Mapping[str, Spec], plan_stage: PlanStage) -> tuple[Plan, ...]:
    """One after the other, from the last stage, which has the head and the loss. What a stage chose for values that it exchanges, and for
    parameters that others have too, is fixed for those that come after. Raises InfeasibleError naming the stage."""
    chosen, plans, flying = dict(fixed), {}, in_flight(made)
    for stage in reversed(made.cut.stages):
        try:
            plan = plans[stage.index] = plan_stage(stage.graph, chosen, flying[stage.index])
        except InfeasibleError as e:
            blocks = f"{stage.blocks[0]} to {stage.blocks[-1]}" if stage.blocks else "no block"
            raise InfeasibleError(f"stage {stage.index} ({blocks}, {flying[stage.index]} micro-batches in flight): {e}", e.proven) from e
        chosen |= plan.placements
        chosen |= {h.send: plan.ops[h.recv].outputs[0] for h in stage.receives} | {h.recv: plan.ops[h.send].inputs[0] for h in stage.sends}
    return tuple(plans[s] for s in range(len(plans)))


def in_flight(made: Pipelined) -> tuple[int, ...]:
    """Per stage, the micro-batches whose saved values are alive at once, counted from the table."""
    n = made.table.stages
    return tuple(max(1, int(held(made.table, np.eye(n)[s])[made.table.rank_of[s]])) for s in range(n))


def wire_seconds(hops: Sequence[Hop], plan: Plan, wire: AxisLink, end: str) -> float:
    """Seconds of these values on their way, at the placements that a stage's plan has. `end`: "send" or "recv"."""
    return sum(float(collectives.seconds("send_recv", wire_bytes(h, plan, end), wire)) for h in hops)


def wire_bytes(hop: Hop, plan: Plan, end: str) -> int:
    return value_bytes(hop.meta, plan.ops[hop.recv].outputs[0] if end == "recv" else plan.ops[hop.send].inputs[0], plan.mesh)


def merged(made: Pipelined, plans: Sequence[Plan], wire: AxisLink) -> Plan:
    """One plan of all stages: the seconds of a step are those of the schedule, played."""
    stages = tuple(_stage(made, s, p, n, wire) for s, p, n in zip(made.cut.stages, plans, in_flight(made), strict=True))
    played = _played(made, stages, plans, wire)
    once = max(sum(stages[s].once_s for s in made.stages_of(r)) for r in range(len(made.table.ranks)))
    step = played.makespan + once
    bound = max(sum(max(0.0, plans[s].bound_s - _ports(made.cut.stages[s], plans[s], wire) * made.cut.graph.microbatches)
                    for s in made.stages_of(r)) for r in range(len(made.table.ranks)))
    first = plans[0]
    return replace(
        first, graph_hash=made.cut.graph.hash, mesh=made.mesh, ops=_union(p.ops for p in plans), placements=_union(p.placements for p in plans),
        copies=tuple(c for p in plans for c in p.copies), fallbacks=tuple(f for p in plans for f in p.fallbacks),
        collectives=tuple(replace(c, stage=s) for s, p in enumerate(plans) for c in p.collectives),
        layouts=tuple(dict.fromkeys(x for p in plans for x in p.layouts)), recompute=tuple(n for p in plans for n in p.recompute),
        offload=tuple(dict.fromkeys(n for p in plans for n in p.offload)), stages=stages, predicted=_predicted(plans, step),
        objective_s=step, bound_s=min(bound, step), gap=max(0.0, step - min(bound, step)) / max(step, 1e-30), status=_status(plans),
        kind=f"pipeline of {len(plans)} stages, {made.options.schedule}; stage 0: {first.kind}",
        notes=tuple(dict.fromkeys((*(n for p in plans for n in p.notes),
                                   "bound and gap are for these cuts, this schedule and these layouts of what crosses stages"))),
        settings={**first.settings, "pipeline": made.options.as_data()}, search=dict(first.search),
        pipeline={"options": made.options.as_data(), "schedule": made.options.schedule, "microbatches": made.cut.graph.microbatches,
                  "layout": layout_of(made.cut.blocks, made.cut.starts), "makespan_s": played.makespan, "bubble": played.bubble,
                  "idle": [float(x) for x in played.idle],
                  "transfers": _transfers(made, plans, wire)})


def _union(maps: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for found in maps:
        out.update(found)
    return out


def _status(plans: Sequence[Plan]) -> str:
    """That of the stage whose plan is known least."""
    return max((p.status for p in plans), key=lambda status: status != "optimal")


def _predicted(plans: Sequence[Plan], step: float) -> dict[str, float]:
    """Sums over stages, but for the step itself."""
    names = dict.fromkeys(name for p in plans for name in p.predicted)
    return {**{name: sum(p.predicted.get(name, 0.0) for p in plans) for name in names}, "step_s": step}


def _ports(stage: Stage, plan: Plan, wire: AxisLink) -> float:
    """Seconds per micro-batch that the stage's own search paid for what it exchanges."""
    return wire_seconds(stage.sends, plan, wire, "send") + wire_seconds(stage.receives, plan, wire, "recv")


def _stage(made: Pipelined, stage: Stage, plan: Plan, flying: int, wire: AxisLink) -> StagePlan:
    """Windows in seconds of one micro-batch, without the wires: those are the schedule's."""
    (own,), m = plan.stages, stage.graph.microbatches
    windows = {}
    for name, seconds in own.windows.items():
        if name not in ONCE:
            sends = [h for h in stage.sends if stage.graph.op(h.send).phase == name]
            receives = [h for h in stage.receives if stage.graph.op(h.recv).phase == name]
            paid = wire_seconds(sends, plan, wire, "send") + wire_seconds(receives, plan, wire, "recv")
            windows[name] = max(0.0, float(seconds) / m - paid)
    once = float(own.once_s) + sum(float(s) for name, s in own.windows.items() if name in ONCE)
    first, last = (stage.blocks[0], stage.blocks[-1]) if stage.blocks else ("", "")
    return replace(own, index=stage.index, rank=made.table.rank_of[stage.index], first=first, last=last, submesh=made.submesh, windows=windows,
                   once_s=once, in_flight=flying)


def _played(made: Pipelined, stages: Sequence[StagePlan], plans: Sequence[Plan], wire: AxisLink) -> Playback:
    def of(*windows: str) -> list[float]:
        return [sum(float(s.windows.get(w, 0.0)) for w in windows) for s in stages]

    def sent(window: str) -> list[float]:
        return [wire_seconds([h for h in s.sends if h.window == window], p, wire, "send") for s, p in zip(made.cut.stages, plans, strict=True)]

    seconds = Seconds.per_stage(len(stages), F=of(FORWARD), B=of(BACKWARD, WEIGHT), I=of(BACKWARD), W=of(WEIGHT), SEND_F=sent(FORWARD),
                                SEND_B=sent(BACKWARD))
    return play(network_of(made.table), seconds)


def _transfers(made: Pipelined, plans: Sequence[Plan], wire: AxisLink) -> list[dict[str, Any]]:
    """Every hop, as it is sent for each micro-batch."""
    out = []
    for hop in made.cut.hops:
        nbytes = wire_bytes(hop, plans[hop.source], "send")
        out.append({"value": hop.name, "from": hop.source, "to": hop.target, "window": hop.window, "nbytes": nbytes,
                    "seconds": float(collectives.seconds("send_recv", nbytes, wire))})
    return out
