"""The chosen pipeline beside other ways to run the same model on the same devices: without stages, with equal ones, and by every schedule."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from autoshard.base.mesh import Mesh
from autoshard.base.plan import Plan
from autoshard.cost.cluster import load_cluster
from autoshard.decide.options import Options
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.decide.pipeline_options import AUTO, Pipeline
from autoshard.errors import InfeasibleError, UsageError
from autoshard.pipeline.cutting.blocks import Blocks
from autoshard.pipeline.microbatches.batch import Batch
from autoshard.pipeline.schedules import SCHEDULES
from autoshard.planner.open_mesh import plan_batch
from autoshard.study.compare import CHOSEN, Comparison, Contender

SCHEDULED = {"GPipe": "gpipe", "1F1B": "1f1b", "interleaved": "interleaved", "zero-bubble": "zb1p"}


def pipeline_comparison(asked: Batch, mesh: Mesh, options: Options, *, model: Mapping[str, Any] | None = None, has_loss: bool = False,
                        clock: PhaseTimer | None = None) -> Comparison:
    """Search a plan, and plan the others with its cuts where they have as many stages, else with searched ones. Raises what planning raises for
    the chosen one; another one that cannot be is a row that says why."""
    clock, cluster = clock or PhaseTimer(None), load_cluster(options.cluster)

    def planned(on: Mesh, pipeline: Pipeline) -> Plan:
        return plan_batch(asked, on, replace(options, pipeline=pipeline), clock=clock, has_loss=has_loss, model_info=model)

    chosen = planned(mesh, options.pipeline)
    rows = [Contender(CHOSEN, _words(chosen), chosen, _fits(chosen), chosen.status)]
    for name, on, pipeline in _others(asked, mesh, options.pipeline, chosen):
        clock.say(name)
        try:
            plan = planned(on, pipeline)
            rows.append(Contender(name, _words(plan), plan, _fits(plan)))
        except (InfeasibleError, UsageError) as e:
            rows.append(Contender(name, "", None, False, str(e)))
    return Comparison(model or {}, mesh, cluster.name, options.memory_limit(cluster), tuple(rows))


def _others(asked: Batch, mesh: Mesh, given: Pipeline, chosen: Plan) -> Iterator[tuple[str, Mesh, Pipeline]]:
    assert chosen.pipeline is not None, "the mesh has stages, so the plan has"
    free = replace(given, microbatches=chosen.pipeline["microbatches"], pinned=(), layout="", cuts=AUTO, chunks=AUTO)
    cuts, ranks = tuple(chosen.pipeline["options"]["cuts"]), given.stages(mesh)
    yield "no pipeline", without_stages(mesh, given.axis), Pipeline(batch_dims=given.batch_dims, inexact=given.inexact)
    yield "equal layers", mesh, replace(free, schedule=chosen.pipeline["schedule"], chunks=(len(cuts) + 1) // ranks,
                                        cuts=equal_cuts(asked, free, len(cuts) + 1))
    one_each = cuts if len(cuts) + 1 == ranks else equal_cuts(asked, free, ranks)
    yield "naive model parallelism", mesh, replace(free, microbatches=1, schedule="gpipe", cuts=one_each)
    for name, schedule in SCHEDULED.items():
        same = (len(cuts) + 1) // ranks in SCHEDULES[schedule].chunks
        yield name, mesh, replace(free, schedule=schedule, cuts=cuts if same else AUTO, chunks=(len(cuts) + 1) // ranks if same else AUTO)


def without_stages(mesh: Mesh, axis: str) -> Mesh:
    """The pipeline's devices on the first of the other axes."""
    sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
    ranks = sizes.pop(axis)
    first = next(iter(sizes), "dp")
    sizes[first] = ranks * sizes.get(first, 1)
    return Mesh(tuple(sizes), tuple(sizes.values()))


def equal_cuts(asked: Batch, pipeline: Pipeline, stages: int) -> tuple[str, ...]:
    """As many blocks in every stage, or nearly; what is before and behind the layers counts as layers do."""
    names = Blocks.of(asked.cut(pipeline).graph).names
    return tuple(names[len(names) * s // stages] for s in range(1, stages))


def _words(plan: Plan) -> str:
    """How it runs, in the column of axes."""
    if plan.pipeline is None:
        return str(plan.mesh)
    cuts = plan.pipeline.get("layout") or ", ".join(plan.pipeline["options"]["cuts"])
    return f"{plan.pipeline['schedule']}, {plan.pipeline['microbatches']} x, {cuts}"


def _fits(plan: Plan) -> bool:
    return plan.memory["total"] <= plan.memory["limit"]
