"""Plans every stage of a pipeline by the ordinary search, within the memory that its rank has for it."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard import collectives
from autoshard.base import quantities
from autoshard.base.plan import Plan, StagePlan
from autoshard.base.spec import Spec
from autoshard.base.turns import Duty
from autoshard.cost.budget import Budget
from autoshard.cost.cluster import AxisLink, Cluster
from autoshard.cost.memory import value_bytes
from autoshard.errors import InfeasibleError
from autoshard.pipeline.cutting.cut import Hop
from autoshard.pipeline.pipelined import Pipelined
from autoshard.pipeline.rank_memory import duties, rank_timelines
from autoshard.play.timeline import Timeline


@dataclass(frozen=True)
class Room:
    """The rank of a stage: what it does in a step, and the part of its memory that the stage may take; or, with a `rate`, the seconds that a byte
    of it costs, with as many micro-batches in flight as `most` says (see `Training`)."""

    duty: Duty | None = None
    share: float = 1.0
    rate: float = 0.0
    most: tuple[int, int] | None = None


ALL = Room()
LEANER = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""What a byte costs where stages do not fit into their shares: at 1, all that they keep costs as many seconds as they take."""
Tell = Callable[[str], None]
PlanStage = Callable[..., Plan]
"""(graph of a stage, placements by name that are fixed, micro-batches in flight, its room) -> its plan. Without a room: a stage by itself."""


def plan_stages(made: Pipelined, fixed: Mapping[str, Spec], plan_stage: PlanStage, tell: Tell = lambda text: None,
                rates: Sequence[float] = ()) -> tuple[Plan, ...]:
    """At the first of the `rates`, seconds a byte, at which they fit. Where there is none, each with all of its rank's memory first. Where the
    stages of a rank do not fit together, they are planned once more, and share its memory as they asked for it, or, where one does not fit into
    its share and no rates were given, all at one. `tell` hears of every stage that is planned. Raises InfeasibleError naming the stage."""
    if found := _at_first(made, fixed, plan_stage, tell, rates):
        return found
    plans = _each(made, fixed, plan_stage, [1.0] * made.table.stages, tell)
    timelines = rank_timelines(made, plans)
    shares = [_share(made, plans, timelines, s) for s in range(len(plans))]
    if min(shares) == 1.0:
        return _as_ranks_hold(plans, timelines)
    try:
        return _within_shares(made, fixed, plan_stage, shares, tell)
    except InfeasibleError as e:
        if rates or e.proven or not (found := _at_first(made, fixed, plan_stage, tell, _leaner(plans))):
            raise
        return found


def _within_shares(made: Pipelined, fixed: Mapping[str, Spec], plan_stage: PlanStage, shares: Sequence[float], tell: Tell) -> tuple[Plan, ...]:
    plans = _each(made, fixed, plan_stage, shares, tell)
    timelines = rank_timelines(made, plans)
    for s in timelines:
        _check(made, plans, timelines, s)
    return _as_ranks_hold(plans, timelines)


def _leaner(plans: Sequence[Plan]) -> list[float]:
    """Rates at which stages may fit that took too much by themselves."""
    kept = sum(max(moment.by_category["saved"] for moment in p.stages[0].timeline) for p in plans)
    return [times * sum(p.objective_s for p in plans) / kept for times in LEANER] if kept else []


def _at_first(made: Pipelined, fixed: Mapping[str, Spec], plan_stage: PlanStage, tell: Tell, rates: Sequence[float]) -> tuple[Plan, ...] | None:
    """At the first of the rates at which they fit; None where there is none."""
    return next((found for rate in rates if (found := _at_rate(made, fixed, plan_stage, tell, rate))), None)


def _at_rate(made: Pipelined, fixed: Mapping[str, Spec], plan_stage: PlanStage, tell: Tell, rate: float) -> tuple[Plan, ...] | None:
    """None where they do not fit."""
    try:
        plans = _each(made, fixed, plan_stage, [1.0] * made.table.stages, tell, rate)
    except InfeasibleError:  # the searches within the limit say why
        return None
    timelines = rank_timelines(made, plans)
    found = _as_ranks_hold(plans, timelines)
    over = [p.memory["total"] - limit for p in found if (limit := p.memory.get("limit")) is not None]
    return found if max(over, default=0.0) <= 0.0 else None


def _as_ranks_hold(plans: Sequence[Plan], timelines: Mapping[int, Timeline]) -> tuple[Plan, ...]:
    """With the memory of the whole rank, where a stage's own plan does not know it."""
    return tuple(replace(p, stages=(_with_memory(p, timelines[s]),)) if s in timelines else p for s, p in enumerate(plans))


def _each(made: Pipelined, fixed: Mapping[str, Spec], plan_stage: PlanStage, shares: Sequence[float], tell: Tell,
          rate: float = 0.0) -> tuple[Plan, ...]:
    """One after the other, from the last stage, which has the head and the loss. What a stage chose for values that it exchanges, and for
    parameters that others have too, is fixed for those that come after."""
    chosen, plans, flying, duty = dict(fixed), {}, made.table.in_flight, duties(made)
    most = max(d.fullest for d in duty) if rate else None  # so that stages that are alike are one search
    for stage in reversed(made.cut.stages):
        s = stage.index
        tell(f"planning {_named(made, s)}" + ("" if shares[s] == 1.0 else f" again, in {shares[s]:.0%} of its rank's memory"))
        try:
            plan = plans[s] = plan_stage(stage.graph, chosen, flying[s], Room(duty[s], shares[s], rate, most))
        except InfeasibleError as e:
            rest = "" if shares[s] == 1.0 else f", which shares its rank's memory with {_others(made, s)}"
            raise InfeasibleError(f"{_named(made, s)}{rest}: {e}", e.proven and shares[s] == 1.0) from e
        chosen |= plan.placements
        chosen |= {h.send: plan.ops[h.recv].outputs[0] for h in stage.receives} | {h.recv: plan.ops[h.send].inputs[0] for h in stage.sends}
    return tuple(plans[s] for s in range(len(plans)))


def _share(made: Pipelined, plans: Sequence[Plan], timelines: Mapping[int, Timeline], s: int) -> float:
    """What a stage gets of its rank's memory: all of it where the rank's stages fit."""
    mine = made.stages_of(made.table.rank_of[s])
    if not any(t in timelines and _over(plans[t], timelines[t]) > 0 for t in mine):
        return 1.0
    alone = {t: float(timelines[t].alone.sum(axis=1).max()) for t in mine}
    fullest = max(float(timelines[t].peak) for t in mine)
    return min(0.999, alone[s] / max(sum(alone.values()), fullest))


def _over(plan: Plan, found: Timeline) -> float:
    """Bytes beyond the limit, with what the allocator takes."""
    memory = plan.stages[0].memory
    limit = memory.get("limit")
    return -1.0 if limit is None else _taken(plan, found) - limit


def _taken(plan: Plan, found: Timeline) -> float:
    return float(found.peak) * (1.0 + Cluster.from_snapshot(plan.cluster).device.allocator_slack)


def _check(made: Pipelined, plans: Sequence[Plan], timelines: Mapping[int, Timeline], s: int) -> None:
    over = _over(plans[s], timelines[s])
    if over > 0:
        taken = _taken(plans[s], timelines[s])
        raise InfeasibleError(f"{_named(made, s)} needs {quantities.size(taken)} on its rank with {_others(made, s) or 'what stages share'}, "
                              f"{quantities.size(over)} more than its limit; give more memory, more ranks to a stage, or another schedule", False)


def _named(made: Pipelined, s: int) -> str:
    stage = made.cut.stages[s]
    blocks = f"{stage.blocks[0]} to {stage.blocks[-1]}" if stage.blocks else "no block"
    return f"stage {s} ({blocks}, {made.table.in_flight[s]} micro-batches in flight)"


def _others(made: Pipelined, s: int) -> str:
    return ", ".join(f"stage {t}" for t in made.stages_of(made.table.rank_of[s]) if t != s)


def _with_memory(plan: Plan, found: Timeline) -> StagePlan:
    (own,) = plan.stages
    limit = own.memory.get("limit")
    budget = Budget(float("inf") if limit is None else limit, Cluster.from_snapshot(plan.cluster).device.allocator_slack)
    return replace(own, memory=found.summary(budget), timeline=found.moments(), largest=found.largest())


def wire_seconds(hops: Sequence[Hop], plan: Plan, wire: AxisLink, end: str) -> float:
    """Seconds of these values on their way, at the placements that a stage's plan has. `end`: "send" or "recv"."""
    return sum(float(collectives.seconds("send_recv", wire_bytes(h, plan, end), wire)) for h in hops)


def wire_bytes(hop: Hop, plan: Plan, end: str) -> int:
    return value_bytes(hop.meta, plan.ops[hop.recv].outputs[0] if end == "recv" else plan.ops[hop.send].inputs[0], plan.mesh)
