"""Memory of the ranks of a pipeline: every stage played once, and what its rank has beside it: micro-batches in flight, other stages."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoshard.base.graph import Ref
from autoshard.base.plan import Plan
from autoshard.base.turns import Duty
from autoshard.base.windows import batch_dim_of
from autoshard.cost.cluster import Cluster
from autoshard.cost.memory import value_bytes
from autoshard.cost.redistribute import Redistribution
from autoshard.pipeline.pipelined import Pipelined
from autoshard.play.footprint import Footprints
from autoshard.play.timeline import Timeline, timeline
from autoshard.recompute.rewrite import with_recompute
from autoshard.space.cost_table import trained_params


def duties(made: Pipelined) -> tuple[Duty, ...]:
    """Of every stage; without what stages share at the end, whose layout no plan has chosen yet."""
    return tuple(Duty(s, made.turns[r], _unread(made, s)) for s, r in enumerate(made.table.rank_of))


def _unread(made: Pipelined, s: int) -> int:
    """Bytes of inputs that the user passes on every rank, and that this stage does not read."""
    read, count = made.cut.stages[s].names("input"), made.cut.graph.microbatches
    return sum((1 if batch_dim_of(op) is None else count) * op.outputs[0].nbytes for op in made.cut.graph.of_kind("input") if op.target not in read)


def rank_timelines(made: Pipelined, plans: Sequence[Plan]) -> dict[int, Timeline]:
    """Of the stages that share a rank with others, or parameters with other stages: their own plans do not know of that."""
    tied = {s for name, _ in made.cut.tied for s in made.cut.readers(name)}
    wanted = [s for s in range(len(plans)) if s in tied or len(made.stages_of(made.table.rank_of[s])) > 1]
    if not wanted:
        return {}
    cluster = Cluster.from_snapshot(plans[0].cluster)
    footprints, route = Footprints(made.submesh, cluster), Redistribution(made.submesh, cluster).steps
    alone, duty_of = {}, duties(made)
    for s in wanted:
        graph = with_recompute(made.cut.stages[s].graph, plans[s].recompute)
        alone[s] = timeline(graph, plans[s], route, footprints, str(plans[s].settings.get("optimizer")), trained_params(graph),
                            cluster.device.updates_together, replace(duty_of[s], shared=_shared(made, plans[s], s)))
    return {s: replace(found, others={t: alone[t] for t in made.stages_of(made.table.rank_of[s]) if t != s}) for s, found in alone.items()}


def _shared(made: Pipelined, plan: Plan, s: int) -> int:
    """Bytes at the end of a step for gradients of tied weights: the parts of other ranks, and the sum."""
    graph, rank_of, out = made.cut.stages[s].graph, made.table.rank_of, 0
    params = {op.target: op for op in graph.of_kind("param")}
    for name, stages in made.cut.tied:
        if name in params:
            nbytes = value_bytes(graph.meta(Ref(params[name].name)), plan.ops[params[name].name].outputs[0], made.submesh)
            out += nbytes * ((len(stages) > 1) + sum(rank_of[t] != rank_of[s] for t in stages))
    return out
