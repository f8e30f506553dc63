"""The schedule of a plan, played with the seconds that the plan says of its stages and transfers: its step is priced and drawn by this."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autoshard.base.graph import BACKWARD, FORWARD, WEIGHT
from autoshard.base.plan import Plan, StagePlan
from autoshard.decide.pipeline_options import AUTO, Pipeline
from autoshard.errors import PlanError, UsageError
from autoshard.pipeline.action_lists.action_text import read_csv
from autoshard.pipeline.action_lists.actions import COMPUTE, ActionTable
from autoshard.pipeline.action_lists.check import check
from autoshard.pipeline.action_lists.network import network_of
from autoshard.pipeline.action_lists.play import Playback, Seconds, play
from autoshard.pipeline.schedules import make_schedule


def named_schedule(options: Pipeline) -> str:
    """What "auto" means where nothing is searched."""
    return "1f1b" if options.schedule == AUTO else options.schedule


def table_of(options: Pipeline, ranks: int, microbatches: int, training: bool) -> ActionTable:
    """The computations of a step. Of a program without gradients the forwards alone are run, of the whole batch at once. Raises UsageError for a
    file of another step, ScheduleError for one that is no schedule."""
    name = named_schedule(options)
    if name.endswith(".csv"):
        table = read_csv(name)
        if training and table.microbatches != microbatches or len(table.ranks) != ranks:
            raise UsageError(f"{name} is for {len(table.ranks)} ranks and {table.microbatches} micro-batches, the step has {ranks} and "
                             f"{microbatches}")
        table = table.only(COMPUTE)
    else:
        table = make_schedule(name, ranks, microbatches, *([] if options.chunks == AUTO else [int(options.chunks)]))
    check(table)
    if training:
        return table
    return ActionTable(tuple(tuple(a for a in actions if a.kind == "F" and a.microbatch == 0) for actions in table.ranks), table.rank_of, 1)


def played(table: ActionTable, stages: Sequence[StagePlan], transfers: Iterable[Mapping[str, Any]]) -> Playback:
    """`transfers` as a plan has them. The step's end (`StagePlan.once_s`) comes after it."""
    def of(*windows: str) -> list[float]:
        return [sum(float(s.windows.get(w, 0.0)) for w in windows) for s in stages]

    sent = {(s, window): 0.0 for s in range(len(stages)) for window in (FORWARD, BACKWARD)}
    for t in transfers:
        sent[t["from"], t["window"]] += float(t["seconds"])
    return play(network_of(table), Seconds.per_stage(
        len(stages), F=of(FORWARD), B=of(BACKWARD, WEIGHT), I=of(BACKWARD), W=of(WEIGHT),
        SEND_F=[sent[s, FORWARD] for s in range(len(stages))], SEND_B=[sent[s, BACKWARD] for s in range(len(stages))]))


def playback_of(plan: Plan) -> Playback:
    """Of a plan with a pipeline, read from a file too. Raises PlanError for one whose pipeline is none, and what `table_of` raises where its
    schedule was a CSV file that is gone."""
    said = plan.pipeline or {}
    try:
        options, microbatches = Pipeline.from_data(dict(said["options"])), int(said["microbatches"])
        table = table_of(options, plan.mesh.sizes[plan.mesh.index(options.axis)], microbatches, bool(plan.settings.get("training")))
        return played(table, plan.stages, transfers_of(plan))
    except (KeyError, TypeError, ValueError, IndexError) as e:
        raise PlanError(f"the plan's pipeline cannot be read ({e}); plan the model again") from e


def transfers_of(plan: Plan) -> tuple[Mapping[str, Any], ...]:
    """What crosses stages. Raises PlanError for what is no transfer."""
    found = (plan.pipeline or {}).get("transfers", ())
    for t in found if isinstance(found, (list, tuple)) else (found,):
        if not isinstance(t, Mapping) or {type(t.get(key)) for key in ("from", "to", "nbytes")} != {int} or not {"window", "seconds"} <= t.keys():
            raise PlanError(f"the plan's transfer {t!r:.60} is none; plan the model again")
    return tuple(found)


def once_of(plan: Plan, rank: int) -> float:
    """Seconds once a step of all stages on a coordinate of the pipeline's axis, with what it exchanges for tied weights."""
    exchange = (plan.pipeline or {}).get("exchange", ())  # not in plans that were made before it was priced
    return sum(float(s.once_s) for s in plan.stages if s.rank == rank) + (float(exchange[rank]) if rank < len(exchange) else 0.0)
