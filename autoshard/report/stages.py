"""A pipeline as rows and pictures, computed from the plan: its stages, what its ranks do when, and how long they wait."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.base import quantities
from autoshard.base.graph import BACKWARD, FORWARD, WEIGHT
from autoshard.base.plan import Plan, StagePlan
from autoshard.errors import AutoshardError, PlanError
from autoshard.pipeline.action_lists.play import Playback
from autoshard.pipeline.playback import once_of, playback_of, transfers_of

IDLE, END = ".", "="
ORDER = (FORWARD, BACKWARD, WEIGHT)
LETTERS = {"F": "F", "B": "B", "I": "B", "W": "W"}
MOST_EVENTS = 12_000
"""Drawn in a page; of a longer step the beginning."""


@dataclass(frozen=True)
class StageRow:
    """One stage: seconds are of one micro-batch by window, but for `once_s`; bytes of one of its ranks, at the peak. `sends`: (stage,
    window, bytes) of a micro-batch, of one rank."""

    index: int
    rank: int
    blocks: str
    ops: int
    parameters: int
    windows: Mapping[str, float]
    once_s: float
    in_flight: int
    nbytes: float
    sends: tuple[tuple[int, str, int], ...]

    @property
    def ordered(self) -> tuple[tuple[str, float], ...]:
        """Windows in the order in which they run."""
        return tuple(sorted(self.windows.items(), key=lambda w: ORDER.index(w[0]) if w[0] in ORDER else len(ORDER)))

    @property
    def sent(self) -> str:
        """What it sends, in words."""
        return ", ".join(f"{quantities.size(n)} {'to' if window == 'forward' else 'back to'} {target}" for target, window, n in self.sends)


@dataclass(frozen=True)
class RankRow:
    """One coordinate of the pipeline's axis: seconds that it computes, waits, and needs at the end of the step (reductions, update)."""

    rank: int
    stages: tuple[int, ...]
    busy_s: float
    idle_s: float
    end_s: float


def is_pipeline(plan: Plan) -> bool:
    return plan.pipeline is not None and len(plan.stages) > 1


def stage_rows(plan: Plan) -> tuple[StageRow, ...]:
    """Nothing for a plan of one stage."""
    return tuple(_stage_row(plan, s) for s in plan.stages) if is_pipeline(plan) else ()


def _stage_row(plan: Plan, s: StagePlan) -> StageRow:
    sums: dict[tuple[int, str], int] = {}
    for t in _transfers(plan):
        if t["from"] == s.index:
            sums[t["to"], t["window"]] = sums.get((t["to"], t["window"]), 0) + t["nbytes"]
    blocks = s.first if s.first == s.last else f"{s.first or 'inputs'} to {s.last or 'outputs'}"
    return StageRow(s.index, s.rank, blocks, s.ops, s.parameters, s.windows, s.once_s, s.in_flight, s.total,
                    tuple((target, window, n) for (target, window), n in sums.items()))


def _transfers(plan: Plan) -> tuple[Mapping[str, Any], ...]:
    try:
        return transfers_of(plan)
    except PlanError:
        return ()


def playback(plan: Plan) -> Playback | None:
    """None without stages, and where the schedule cannot be read, or was a file that is gone."""
    try:
        return playback_of(plan) if is_pipeline(plan) else None
    except AutoshardError:
        return None


def rank_rows(plan: Plan, played: Playback) -> tuple[RankRow, ...]:
    stages = {r: tuple(s.index for s in plan.stages if s.rank == r) for r in range(len(played.busy))}
    step = float(plan.predicted.get("step_s", plan.objective_s))
    return tuple(RankRow(r, mine, float(played.busy[r]), max(0.0, step - float(played.busy[r]) - once_of(plan, r)), once_of(plan, r))
                 for r, mine in stages.items())


def lines(plan: Plan, played: Playback, width: int) -> Iterator[str]:
    """A line per rank, `width` characters for the step: in each slot what the rank does most of the time, "." if it waits."""
    step = float(plan.predicted.get("step_s", plan.objective_s)) or 1.0
    edges = np.linspace(0.0, step, width + 1)
    for row in rank_rows(plan, played):
        shares = {letter: np.zeros(width) for letter in ("F", "B", "W", END)}
        for kind, start, end in (*_computed(played, row.rank), (END, played.makespan, played.makespan + row.end_s)):
            shares[LETTERS.get(kind, kind)] += np.clip(np.minimum(edges[1:], end) - np.maximum(edges[:-1], start), 0.0, None)
        idle = step / width - sum(shares.values())
        letters = [*shares, IDLE]
        yield "".join(letters[i] for i in np.argmax(np.stack([*shares.values(), idle]), axis=0))


def _computed(played: Playback, rank: int) -> Iterator[tuple[str, float, float]]:
    for i in np.flatnonzero(played.network.place == rank):
        yield played.network.events[i].kind, float(played.start[i]), float(played.end[i])


def drawing(plan: Plan, played: Playback) -> dict[str, Any]:
    """What the page draws: per rank the events in order, as (kind, stage, micro-batch, begin); `lasts[kind][stage]`: their seconds."""
    on_ranks = [[int(i) for i in np.flatnonzero(played.network.place == r)] for r in range(len(played.busy))]
    shown = _shown(played, sum(map(len, on_ranks)))
    lasts: dict[str, dict[int, float]] = {}
    rows = []
    for row, numbers in zip(rank_rows(plan, played), on_ranks, strict=True):
        events = []
        for i in numbers:
            event = played.network.events[i]
            lasts.setdefault(event.kind, {})[event.stage] = float(played.end[i] - played.start[i])
            if played.start[i] < shown:
                events.append((event.kind, event.stage, event.microbatch, float(played.start[i])))
        rows.append({"rank": row.rank, "stages": row.stages, "busy": row.busy_s, "idle": row.idle_s, "end": row.end_s, "events": events})
    step = float(plan.predicted.get("step_s", plan.objective_s))
    return {"rows": rows, "lasts": lasts, "makespan": played.makespan, "shown": min(shown, step), "step": step, "bubble": played.bubble}


def _shown(played: Playback, count: int) -> float:
    """Seconds of the step that are drawn."""
    return float("inf") if count <= MOST_EVENTS else float(np.sort(played.start[played.network.place >= 0])[MOST_EVENTS])
