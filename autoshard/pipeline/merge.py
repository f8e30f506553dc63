"""The plans of all stages, put together into one plan. Its step is the schedule, played, and then the end of the fullest rank's step."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from autoshard import collectives
from autoshard.base.plan import OPTIMAL_REFINED, REFINED, Plan, StagePlan
from autoshard.base.windows import ONCE
from autoshard.cost.cluster import AxisLink, Cluster
from autoshard.pipeline.action_lists.play import Playback
from autoshard.pipeline.cutting.cut import Stage
from autoshard.pipeline.cutting.layout import layout_of
from autoshard.pipeline.exchange import exchange_seconds
from autoshard.pipeline.pipelined import Pipelined
from autoshard.pipeline.plan_stages import wire_bytes, wire_seconds
from autoshard.pipeline.playback import played
from autoshard.search.problem import Status

NO_GAP = 1e-9
OPTIMAL = (Status.OPTIMAL.value, Status.OPTIMAL_TIED.value, OPTIMAL_REFINED)  # what is known most first


def merged(made: Pipelined, plans: Sequence[Plan], wire: AxisLink) -> Plan:
    """One plan of all stages. `predicted` is of the busiest rank: its parts add up to the step."""
    stages = tuple(_stage(made, s, p, n, wire) for s, p, n in zip(made.cut.stages, plans, made.table.in_flight, strict=True))
    transfers = _transfers(made, plans, wire)
    playback = played(made.table, stages, transfers)
    exchange = _exchange(made, plans, wire)
    once = max(sum(stages[s].once_s for s in made.stages_of(r)) + exchange[r] for r in range(len(made.table.ranks)))
    step = playback.makespan + once
    bound = min(step, max(_bound(made, plans, r, wire) + exchange[r] for r in range(len(made.table.ranks))))
    gap = max(0.0, step - bound) / max(step, 1e-30)
    first = plans[0]
    return replace(
        first, graph_hash=made.cut.graph.hash, mesh=made.mesh, ops=_union(p.ops for p in plans), placements=_union(p.placements for p in plans),
        copies=tuple(c for p in plans for c in p.copies), fallbacks=tuple(f for p in plans for f in p.fallbacks),
        collectives=tuple(replace(c, stage=s) for s, p in enumerate(plans) for c in p.collectives),
        layouts=tuple(dict.fromkeys(x for p in plans for x in p.layouts if not x.name.startswith("recv:"))),
        recompute=tuple(n for p in plans for n in p.recompute),
        offload=tuple(dict.fromkeys(n for p in plans for n in p.offload)), stages=stages, worth=None,
        predicted=_predicted(made, plans, wire, playback, step, exchange), objective_s=step, bound_s=bound, gap=gap, status=_status(plans, gap),
        kind=f"pipeline of {len(plans)} stages, {made.options.schedule}; " + "; ".join(by_stage([p.kind] for p in plans)),
        notes=(*by_stage(p.notes for p in plans), "bound and gap are for these cuts, this schedule and these layouts of what crosses stages"),
        settings={**first.settings, "pipeline": made.options.as_data()}, search=_sums(p.search for p in plans),
        pipeline={"options": made.options.as_data(), "schedule": made.options.schedule, "microbatches": made.cut.graph.microbatches,
                  "layout": layout_of(made.cut.blocks, made.cut.starts), "makespan_s": playback.makespan, "bubble": playback.bubble,
                  "busy": [float(x) for x in playback.busy], "idle": [float(x) for x in playback.idle], "exchange": exchange,
                  "transfers": transfers})


def by_stage(texts: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """What is said of stages, each once: as it is where it is said of all, else with the stages in front."""
    of = [tuple(dict.fromkeys(said)) for said in texts]
    found: dict[str, list[int]] = {}
    for s, said in enumerate(of):
        for text in said:
            found.setdefault(text, []).append(s)
    return tuple(text if len(where) == len(of) else f"{_numbered(where)}: {text}" for text, where in found.items())


def _numbered(stages: Sequence[int]) -> str:
    """`[0]` -> "stage 0", `[0, 1, 2, 5]` -> "stages 0-2, 5"."""
    runs: list[list[int]] = []
    for s in stages:
        if runs and s == runs[-1][-1] + 1:
            runs[-1].append(s)
        else:
            runs.append([s])
    words = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"stage{'s' if len(stages) > 1 else ''} {words}"


def _union(maps: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for found in maps:
        out.update(found)
    return out


def _sums(facts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Numbers of the searches added up; of other facts those of the first."""
    out: dict[str, Any] = {}
    for found in facts:
        for name, value in found.items():
            adds = isinstance(value, int) and not isinstance(value, bool)
            out[name] = out.get(name, 0) + value if adds else out.get(name, value)
    return out


def _status(plans: Sequence[Plan], gap: float) -> str:
    """That of the stage whose plan is known least. Stages that are optimal one by one make an optimal step only if no rank waits."""
    known_least = next((p.status for p in plans if p.status not in OPTIMAL), None)
    if known_least is None and gap <= NO_GAP:
        return max((p.status for p in plans), key=OPTIMAL.index)
    status = known_least or Status.GAP.value
    return f"{status}{REFINED}" if any(p.refined for p in plans) and not status.endswith(REFINED) else status


def _bound(made: Pipelined, plans: Sequence[Plan], rank: int, wire: AxisLink) -> float:
    """Seconds of a rank's own work, at least: what its stages' searches proved, without what they paid for wires."""
    return sum(max(0.0, plans[s].bound_s - _ports(made.cut.stages[s], plans[s], wire) * made.cut.graph.microbatches)
               for s in made.stages_of(rank))


def _predicted(made: Pipelined, plans: Sequence[Plan], wire: AxisLink, playback: Playback, step: float,
               exchange: Sequence[float]) -> dict[str, float]:
    """Of the rank that computes longest, without wires: those are its waiting, where it waits for them."""
    rank = int(playback.busy.argmax())
    mine, shared = made.stages_of(rank), exchange[rank]
    names = dict.fromkeys(name for s in mine for name in plans[s].predicted if name != "bucketed_s")
    sums = {name: sum(plans[s].predicted.get(name, 0.0) for s in mine) for name in names}
    wires = sum(_ports(made.cut.stages[s], plans[s], wire) for s in mine) * made.cut.graph.microbatches
    sums["blocking_s"] = max(0.0, sums.get("blocking_s", 0.0) - wires)
    idle = max(0.0, step - (sums.get("step_s", 0.0) - wires) - shared)
    return {**sums, "step_s": step, "idle_s": idle, **({"exchange_s": shared} if shared else {})}


def _exchange(made: Pipelined, plans: Sequence[Plan], wire: AxisLink) -> list[float]:
    device = Cluster.from_snapshot(plans[0].cluster).device
    return exchange_seconds(made, plans, device, lambda part: float(collectives.seconds("send_recv", part.nbytes, wire)))


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
                   ops=len(stage.graph.of_kind("call")), parameters=sum(prod(op.outputs[0].shape) for op in stage.graph.of_kind("param")),
                   once_s=once, in_flight=flying)


def _transfers(made: Pipelined, plans: Sequence[Plan], wire: AxisLink) -> list[Mapping[str, Any]]:
    """Every hop, as it is sent for each micro-batch."""
    out: list[Mapping[str, Any]] = []
    for hop in made.cut.hops:
        nbytes = wire_bytes(hop, plans[hop.source], "send")
        out.append({"value": hop.name, "from": hop.source, "to": hop.target, "window": hop.window, "nbytes": nbytes,
                    "seconds": float(collectives.seconds("send_recv", nbytes, wire))})
    return out
