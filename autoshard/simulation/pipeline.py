"""A pipeline: the windows of each stage are replayed on its ranks, and the schedule's actions played with their seconds.

The player is the one that prices plans (pipeline/action_lists/play.py). It takes one duration per kind of action and stage: the slowest rank's,
since all ranks of a stage meet in what they send. So a slow rank slows its whole stage; jitter is drawn once per window of a stage, not for
every micro-batch.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoshard.base.graph import BACKWARD, FORWARD, WEIGHT, Graph
from autoshard.base.plan import Plan
from autoshard.base.windows import ONCE
from autoshard.collectives.phases import alone, phases
from autoshard.cost.cluster import Cluster
from autoshard.lower.schedule import schedule
from autoshard.pipeline.action_lists.action_text import text_of
from autoshard.pipeline.action_lists.actions import Action
from autoshard.pipeline.action_lists.network import NOTHING, network_of
from autoshard.pipeline.action_lists.play import Playback, Seconds, play
from autoshard.pipeline.cutting.cut import Hop
from autoshard.pipeline.exchange import exchange_seconds, parts
from autoshard.pipeline.pipelined import Pipelined, pipelined_as, stage_plan
from autoshard.pipeline.plan_stages import wire_bytes
from autoshard.recompute.rewrite import with_recompute
from autoshard.runtime.check_plan import check_fits
from autoshard.runtime.route import route_of
from autoshard.simulation.conditions import Conditions
from autoshard.simulation.events import play as play_program
from autoshard.simulation.flops import executed_seconds, model_seconds
from autoshard.simulation.program import UPDATE, check_loads, program_of, update_program
from autoshard.simulation.replay import FINISHED, Cause, Replay
from autoshard.simulation.result import Idle, Simulation, idle_rows
from autoshard.simulation.trace import COMPUTE, Span, Track
from autoshard.simulation.traffic import Sending, link_use, over_time, sendings, sizes

PIPELINE = "pipeline"
"""Why a rank is idle: it waits for what other stages send."""


@dataclass(frozen=True, eq=False)
class StageRun:
    """One stage on coordinate `rank` of the pipeline's axis: its graph and plan, and each of its windows, replayed; the optimizer's update is one."""

    index: int
    rank: int
    graph: Graph
    plan: Plan
    windows: Mapping[str, Replay]

    def seconds(self, *names: str) -> float:
        """Of one run of these windows."""
        return sum(self.windows[n].step_s for n in names if n in self.windows)

    @property
    def once_s(self) -> float:
        return self.seconds(*ONCE, UPDATE)

    def runs(self, name: str) -> int:
        """How often a step runs a window."""
        return 1 if name == UPDATE else self.graph.runs_of(name)


def simulate_pipeline(graph: Graph, plan: Plan, cluster: Cluster, conditions: Conditions, executed: bool, ranks: Sequence[int]) -> Simulation:
    """A step of a plan with stages. Raises PlanError for a plan of another model."""
    made = pipelined_as(graph, plan)
    stages = tuple(_stage(made, plan, s, cluster, conditions, executed) for s in range(made.table.stages))
    if conditions.expert_load:
        check_loads(w for s in stages for played in s.windows.values() for w in played.program.works)
    played = play(network_of(made.table), _seconds(made, stages, cluster, conditions))
    shared = exchange_seconds(made, [s.plan for s in stages], cluster.device,
                              lambda part: _wire_seconds(made, (part.source, part.target), part.nbytes, cluster, conditions))
    ends = np.array([sum(stages[s].once_s for s in made.stages_of(r)) + shared[r] for r in range(len(made.table.ranks))])
    step, (idle, work, slowed) = played.makespan + float(ends.max()), _idle(made, stages, played, ends, shared)
    first = [stages[s] for s in made.stages_of(0)]
    calls = tuple(c for stage in first for name, w in stage.windows.items() for c in w.program.calls * stage.runs(name))
    sent = list(_sendings(made, stages, played, cluster))
    done = [(executed_seconds(s.graph, s.plan, cluster.device), model_seconds(s.graph, s.plan, cluster.device)) for s in stages]
    return Simulation(
        plan, conditions, executed, step, work, slowed, slowest=int(ends.argmax()) * made.submesh.size,
        fastest_s=played.makespan + float(ends.min()), idle=idle, critical=(), links=link_use((s.phases for s in sent), step),
        sizes=sizes(calls), memory=(), traffic=over_time(sent, step) if step else (),
        mfu=sum(m for _, m in done) / plan.mesh.size / step, hfu=sum(e for e, _ in done) / len(made.table.ranks) / step,
        make_tracks=lambda: _tracks(made, stages, played, ranks, shared), stages=_rows(made, stages, played))


def _stage(made: Pipelined, plan: Plan, index: int, cluster: Cluster, conditions: Conditions, executed: bool) -> StageRun:
    own, graph = stage_plan(plan, made, index), made.cut.stages[index].graph
    check_fits(own, graph, made.submesh)
    graph, rank = with_recompute(graph, own.recompute), made.table.rank_of[index]
    order = schedule(graph, own, made.submesh, route_of(own))
    here = _within(conditions, made, rank, cluster)
    programs = {w.name: program_of(graph, own, order, cluster, executed=executed, windows=(w.name,)) for w in order.windows}
    update = update_program(graph, own, cluster)
    return StageRun(index, rank, graph, own, {name: play_program(p, cluster, here) for name, p in {**programs, UPDATE: update}.items() if p.events})



def _within(conditions: Conditions, made: Pipelined, rank: int, cluster: Cluster) -> Conditions:
    """The part of the conditions that is about the ranks of one coordinate of the pipeline's axis, by their numbers on the submesh."""
    inside = made.submesh.size
    first, last = _nodes_of(made, rank, cluster)
    links: dict[str, float] = {}
    for text, share in conditions.slow_links.items():
        name, _, node = text.partition("@")
        if not node or first <= int(node) <= last:
            links[f"{name}@{int(node) - first}" if node else name] = share
    slow = {r - rank * inside: factor for r, factor in conditions.slow_ranks.items() if r // inside == rank}
    loads = {r - rank * inside: load for r, load in conditions.expert_load.items() if r // inside == rank}
    return replace(conditions, slow_ranks=slow, slow_links=links, expert_load=loads, seed=conditions.seed + rank)


def _nodes_of(made: Pipelined, rank: int, cluster: Cluster) -> tuple[int, int]:
    """The first and the last node with ranks of one coordinate of the pipeline's axis."""
    inside, devices = made.submesh.size, int(min(cluster.links[0].devices if len(cluster.links) > 1 else made.mesh.size, made.mesh.size))
    return rank * inside // devices, ((rank + 1) * inside - 1) // devices


def _seconds(made: Pipelined, stages: Sequence[StageRun], cluster: Cluster, conditions: Conditions) -> Seconds:
    def of(*windows: str) -> list[float]:
        return [s.seconds(*windows) for s in stages]

    def sent(window: str) -> list[float]:
        return [sum(_sent(made, stages, hop, cluster, conditions) for hop in stage.sends if hop.window == window) for stage in made.cut.stages]

    return Seconds.per_stage(len(stages), F=of(FORWARD), B=of(BACKWARD, WEIGHT), I=of(BACKWARD), W=of(WEIGHT), SEND_F=sent(FORWARD),
                             SEND_B=sent(BACKWARD))


def _sent(made: Pipelined, stages: Sequence[StageRun], hop: Hop, cluster: Cluster, conditions: Conditions) -> float:
    ends = stages[hop.source].rank, stages[hop.target].rank
    return _wire_seconds(made, ends, wire_bytes(hop, stages[hop.source].plan, "send"), cluster, conditions)


def _wire_seconds(made: Pipelined, ends: tuple[int, int], nbytes: int, cluster: Cluster, conditions: Conditions) -> float:
    """Seconds of a value on its way between two ranks of the pipeline's axis: the slowest card at either end counts."""
    nodes = [_nodes_of(made, rank, cluster) for rank in ends]
    share: dict[str, float] = {}
    for text, left in conditions.slow_links.items():
        name, _, node = text.partition("@")
        if not node or any(first <= int(node) <= last for first, last in nodes):
            share[name] = min(left, share.get(name, 1.0))
    groups = phases("send_recv", nbytes, cluster.links_for(made.mesh)[0])
    return float(sum(max(phase.seconds(share.get(phase.link, 1.0)) for phase in group) for group in groups))


# --- what is found ---

RUN_BY = {"F": (FORWARD,), "B": (BACKWARD, WEIGHT), "I": (BACKWARD,), "W": (WEIGHT,)}
"""The windows that an action runs."""


def _sendings(made: Pipelined, stages: Sequence[StageRun], played: Playback, cluster: Cluster) -> Iterator[Sending]:
    """What the first rank sends: the collectives of its stages wherever their actions run, what its stages send to others, its parts of tied
    gradients, and what is done once a step."""
    wire, at = cluster.links_for(made.mesh)[0], played.makespan
    for event, place, start, end in _events(played):
        stage = stages[event.stage]
        if place == 0:
            yield from _windows(stage, RUN_BY[event.kind], start)
        elif place == NOTHING and stage.rank == 0:
            window = FORWARD if event.kind == "SEND_F" else BACKWARD
            yield Sending(start, end, tuple(group for hop in made.cut.stages[event.stage].sends if hop.window == window
                                            for group in phases("send_recv", wire_bytes(hop, stage.plan, "send"), wire)))
    for part in parts(made, [s.plan for s in stages]):
        if part.source == 0:
            groups = phases("send_recv", part.nbytes, wire)
            yield Sending(at, at := at + alone(groups), groups)
    for s in made.stages_of(0):
        yield from _windows(stages[s], (*ONCE, UPDATE), at)
        at += stages[s].once_s


def _events(played: Playback) -> Iterator[tuple[Action, int, float, float]]:
    """What is played, on which rank (NOTHING: on a wire), from when to when."""
    return zip(played.network.events, played.network.place.tolist(), played.start.tolist(), played.end.tolist(), strict=True)


def _windows(stage: StageRun, names: Sequence[str], at: float) -> Iterator[Sending]:
    for name in names:
        if name in stage.windows:
            yield from sendings(stage.windows[name], 0, at)
            at += stage.windows[name].step_s


def _idle(made: Pipelined, stages: Sequence[StageRun], played: Playback, ends: np.ndarray,
          shared: Sequence[float]) -> tuple[tuple[Idle, ...], float, float]:
    """Idle time by cause, and the mean of work and of what it loses to collectives, over all ranks."""
    shape = (len(made.table.ranks), *made.submesh.sizes)
    idle: dict[Cause, np.ndarray] = {}
    work, slowed = np.zeros(shape), np.zeros(shape)

    def add(cause: Cause, rank: int, seconds: np.ndarray | float) -> None:
        idle.setdefault(cause, np.zeros(shape))[rank] += seconds

    for stage in stages:
        for name, window in stage.windows.items():
            work[stage.rank] += stage.runs(name) * window.worked
            slowed[stage.rank] += stage.runs(name) * window.slowed
            for cause, seconds in window.idle.items():
                add(cause, stage.rank, stage.runs(name) * seconds)
    for rank, seconds in enumerate(played.idle):
        add((PIPELINE, "", ""), rank, float(seconds) + shared[rank])
        add((FINISHED, "", ""), rank, float(ends.max() - ends[rank]))
    return idle_rows({cause: seconds for cause, seconds in idle.items() if seconds.any()}), float(work.mean()), float(slowed.mean())


def _rows(made: Pipelined, stages: Sequence[StageRun], played: Playback) -> tuple[Mapping[str, Any], ...]:
    return tuple({"stage": s.index, "rank": s.rank, "forward_s": s.seconds(FORWARD), "backward_s": s.seconds(BACKWARD),
                  "weight_s": s.seconds(WEIGHT), "once_s": s.once_s, "busy_s": float(played.busy[s.rank]),
                  "idle_s": float(played.idle[s.rank])} for s in stages)


def _tracks(made: Pipelined, stages: Sequence[StageRun], played: Playback, ranks: Sequence[int],
            shared: Sequence[float]) -> tuple[Track, ...]:
    """A track per coordinate of the pipeline's axis, with its actions, by the first of its ranks, or those that were asked for."""
    inside = made.submesh.size
    shown = ranks or [inside * r for r in range(len(made.table.ranks))]
    return tuple(Track(rank, f"rank {rank}" + ("" if ranks or inside == 1 else f" and {inside - 1} like it"),
                       tuple(_spans(made, stages, played, rank // inside, shared[rank // inside])), 1 if ranks else inside) for rank in shown)


def _spans(made: Pipelined, stages: Sequence[StageRun], played: Playback, rank: int, shared: float) -> Iterator[Span]:
    for event, place, start, end in _events(played):
        details = {"stage": event.stage, "microbatch": event.microbatch}
        if place == rank:
            yield Span(COMPUTE, text_of(event), start, end, event.kind, details)
        elif place == NOTHING and made.table.rank_of[event.stage] == rank:
            yield Span(f"sends {event.kind.removeprefix('SEND_')}", text_of(event), start, end, "communication", details)
    at = played.makespan
    if shared:
        yield Span(COMPUTE, "exchange of tied gradients", at, at + shared, "communication", {})
        at += shared
    for s in made.stages_of(rank):
        yield Span(COMPUTE, f"{s}: once a step", at, at + stages[s].once_s, UPDATE, {"stage": s})
        at += stages[s].once_s
