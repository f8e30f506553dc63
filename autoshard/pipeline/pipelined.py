"""A program with pipeline options -> its stages on the mesh: cut, schedule, and the mesh that each stage has."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from autoshard.base.graph import Graph
from autoshard.base.mesh import Mesh
from autoshard.base.plan import RECOMPUTE_SUFFIX, Plan
from autoshard.base.roles import Role
from autoshard.base.turns import Turn
from autoshard.cost.cluster import Cluster
from autoshard.decide.pipeline_options import AUTO, Pipeline
from autoshard.errors import MeshError, PlanError, UsageError
from autoshard.pipeline.action_lists.actions import COMPUTE, ActionTable
from autoshard.pipeline.action_lists.check import check
from autoshard.pipeline.action_lists.transfers import with_transfers
from autoshard.pipeline.cutting.blocks import Blocks
from autoshard.pipeline.cutting.cut import Cut, cut
from autoshard.pipeline.cutting.cut_points import balanced, named
from autoshard.pipeline.cutting.layout import starts_of
from autoshard.pipeline.cutting.pinned import allowed, check_pinned
from autoshard.pipeline.cutting.split import split_backward
from autoshard.pipeline.playback import named_schedule, table_of
from autoshard.pipeline.turns import CROSSING, turns_of


@dataclass(frozen=True, eq=False)
class Pipelined:
    """`table` has sends and receives; `options` say all that a plan must say to be made again: cuts by name, the schedule."""

    cut: Cut
    table: ActionTable
    mesh: Mesh
    options: Pipeline

    @cached_property
    def submesh(self) -> Mesh:
        """The mesh of every stage."""
        return submesh(self.mesh, self.options.axis)

    @cached_property
    def turns(self) -> tuple[tuple[Turn, ...], ...]:
        """Per rank of the pipeline."""
        return tuple(turns_of(self.table, self.cut.stages, rank) for rank in range(len(self.table.ranks)))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages on a coordinate of the pipeline's axis."""
        return tuple(s for s, r in enumerate(self.table.rank_of) if r == rank)

    def holders(self, name: str) -> list[int]:
        """Coordinates on the pipeline's axis of the stages that have the parameter."""
        return sorted({self.table.rank_of[s] for s in self.cut.readers(name)})


def submesh(mesh: Mesh, axis: str) -> Mesh:
    """The mesh without the pipeline's axis; of that alone, one rank. Raises MeshError where it is not the first: stages are neighbours of whole
    submeshes."""
    if mesh.names[0] != axis:
        raise MeshError(f"mesh {mesh}: the pipeline's axis {axis!r} must be the first, so that the ranks of a stage are neighbours; write "
                        f"'{axis}={mesh.sizes[mesh.index(axis)]},...'")
    return Mesh(mesh.names[1:], mesh.sizes[1:]) if mesh.ndim > 1 else Mesh((axis,), (1,))


def pipelined(graph: Graph, mesh: Mesh, options: Pipeline, cluster: Cluster | None = None) -> Pipelined:
    """Cut `graph` and make the table. `cluster`: to balance stages by, where the cuts are not given. Raises UsageError."""
    submesh(mesh, options.axis)
    table = _table(options, options.stages(mesh), graph)
    blocks = Blocks.of(graph)
    if table.stages > len(blocks.blocks):
        raise UsageError(f"{table.stages} stages need as many blocks at least, and the model has {len(blocks.blocks)}: "
                         f"{', '.join(blocks.names)}; use a shorter pipeline")
    made = _held_by_every_rank(cut(graph, _starts(blocks, options, table.stages, cluster), blocks), table)
    _check_loss(made)
    _check_buffers(made)
    _check_skips(made, table)
    found = replace(options, cuts=made.names, layout="", schedule=named_schedule(options), microbatches=graph.microbatches)
    return Pipelined(split_backward(made) if table.split_backward else made, table, mesh, found)


def _held_by_every_rank(made: Cut, table: ActionTable) -> Cut:
    """With the bytes of what no stage reads in the first stage of every rank: the program of another call may read it in any stage."""
    idle = made.graph.idle
    first = {table.rank_of.index(r) for r in range(len(table.ranks))}
    return replace(made, stages=tuple(replace(s, graph=replace(s.graph, idle=idle if s.index in first else (0, 0))) for s in made.stages))


def _starts(blocks: Blocks, options: Pipeline, stages: int, cluster: Cluster | None) -> tuple[int, ...]:
    """The blocks at which stages begin. Raises UsageError."""
    may_be = allowed(blocks, options.pinned, stages)
    if options.cuts == AUTO and not options.layout:
        if cluster is None:
            raise PlanError("the plan does not say where its stages begin; plan the model again")
        return balanced(blocks, cluster, stages, may_be)
    starts = starts_of(options.layout, blocks, stages) if options.layout else named(blocks, options.cuts, stages)
    if may_be is not None:
        check_pinned(blocks, options.pinned, starts)
    return starts


def _table(options: Pipeline, ranks: int, graph: Graph) -> ActionTable:
    made = with_transfers(table_of(options, ranks, graph.microbatches, graph.training))
    if graph.training:
        check(made)
    return made


def _check_loss(made: Cut) -> None:
    """Schedules mix forward and backward, so the loss must be in the graph, and made by the last stage."""
    if not made.graph.training:
        return
    for stage in made.stages[:-1]:
        found = [op for op in stage.graph.of_kind("tangent") if not op.is_port]
        if found:
            raise UsageError(f"output {found[0].target} of the model is differentiated in stage {stage.index}, and a pipeline begins its backward in "
                             "the last stage; cut before what makes it")
    shapes = [made.graph.meta(made.graph.outputs(Role.USER)[op.target].refs[0]).shape for op in made.graph.of_kind("tangent")]
    if len(shapes) != 1 or shapes[0]:
        raise UsageError("a pipeline needs the loss in the graph: one differentiable number; pass loss_fn=, or return {\"loss\": loss, ...}")


def _check_buffers(made: Cut) -> None:
    """Every stage has a copy of the buffers that it reads, and is not told what another one writes."""
    for stage in made.stages:
        for name in stage.graph.outputs(Role.MUTATION):
            if any(name in s.names("param") for s in made.stages):
                raise UsageError(f"the model writes into its parameter {name!r} in stage {stage.index}, and stages of a pipeline write buffers "
                                 "alone; write it outside of the model, between steps")
            if others := [s.index for s in made.stages if s is not stage and name in s.names("buffer")]:
                raise UsageError(f"the buffer {name} is written in stage {stage.index}, and stage {others[0]} has a copy of it, which would stay "
                                 "behind; cut where one stage reads and writes it, or give each stage a buffer of its own")


def _check_skips(made: Cut, table: ActionTable) -> None:
    """What skips stages arrives in the order in which it is sent: both ends must take micro-batches in one order."""
    for hop in (h for h in made.hops if h.skips):
        kinds = [kind for kind in COMPUTE if CROSSING.get(kind) == hop.window]
        sent, taken = ([a.microbatch for a in table.ranks[table.rank_of[s]] if a.stage == s and a.kind in kinds] for s in (hop.source, hop.target))
        if sent != taken:
            raise UsageError(f"stage {hop.target} reads {hop.value} of stage {hop.source}, and the schedule runs micro-batches of one in the order "
                             f"{sent} and of the other in the order {taken}; give both the same order")


def stage_plan(plan: Plan, made: Pipelined, s: int) -> Plan:
    """The part of a plan that is about stage `s`, as a plan of the stage's own graph and mesh."""
    graph = made.cut.stages[s].graph
    names = {*graph.by_name, *(name + RECOMPUTE_SUFFIX for name in graph.by_name)}
    copies = tuple(c for c in plan.copies if c.value in names or _maker(c.value) in names)
    own = {op.target for op in graph.of_kind("param", "buffer")}
    ops = {name: o for name, o in plan.ops.items() if name in names}
    return replace(plan, graph_hash=graph.hash, mesh=made.submesh, ops=ops, copies=copies, pipeline=None,
                   placements={n: p for n, p in plan.placements.items() if n in own},
                   recompute=tuple(n for n in plan.recompute if n in graph.by_name), offload=tuple(n for n in plan.offload if n in own))


def _maker(value: str) -> str:
    """Name of the op that makes a value, from its text: "op", or "op:1" for another output than the first."""
    name, _, index = value.rpartition(":")
    return name if name and index.isdigit() else value


def pipelined_as(graph: Graph, plan: Plan) -> Pipelined:
    """The stages for which `plan` was made. Raises PlanError."""
    if plan.pipeline is None:
        raise PlanError("the plan has no pipeline, and the mesh has one; plan the model again")
    options = plan.pipeline.get("options")
    if not isinstance(options, Mapping):
        raise PlanError("the plan does not say the options of its pipeline; plan the model again")
    return pipelined(graph, plan.mesh, Pipeline.from_data(dict(options)))
