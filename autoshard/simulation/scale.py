"""A plan's placements on a larger or smaller mesh, or with another batch: what a step would take there, without a search.

Every op keeps its placements on the mesh axes of the same names. Bytes of the collectives inside ops are counted anew from the rows of their
rules; all others follow from the schedule.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoshard.base.graph import Graph, Op
from autoshard.base.mesh import Mesh
from autoshard.base.plan import Collective, Plan, StagePlan
from autoshard.base.spec import local_shape
from autoshard.errors import MeshError, PlanError, UsageError
from autoshard.program.flow import casts_of_parts, rows_of
from autoshard.recompute.rewrite import with_recompute
from autoshard.runtime.check_plan import check_fits


def at_scale(plan: Plan, graph: Graph, mesh: Mesh) -> Plan:
    """`plan` for `mesh` and for `graph`, which is its program, of another batch perhaps. It is executable data without prices: no objective, no
    memory over time. Raises UsageError where axes have other names or a placement does not divide, PlanError for another program."""
    if plan.pipeline is not None:
        raise UsageError("a plan with pipeline stages is simulated on its own mesh and batch; plan the model for another")
    if mesh.names != plan.mesh.names:
        raise UsageError(f"mesh {mesh}: the plan has the axes {', '.join(plan.mesh.names)}; give sizes for these, such as {plan.mesh}")
    known = with_recompute(graph, plan.recompute)
    if {op.name for op in known.ops} != set(plan.ops):
        raise PlanError("the plan is for another program: the model traces to other ops than the plan knows; plan the model again")
    bare = replace(plan, mesh=mesh, graph_hash=graph.hash, stages=(StagePlan(submesh=mesh),), objective_s=0.0, predicted={})
    try:
        bare.spec_mesh  # noqa: B018
        check_fits(bare, graph, mesh)
    except (MeshError, PlanError) as e:
        raise UsageError(f"the plan's placements do not fit mesh {mesh}: {e}") from None
    return replace(bare, collectives=tuple(inner_collectives(bare, known)))


def inner_collectives(plan: Plan, graph: Graph) -> Iterator[Collective]:
    """Those inside ops, from the rows of their rules, without seconds. `graph`: with what backward recomputes."""
    of_parts = casts_of_parts(graph)
    for op in graph.of_kind("call"):
        for axis, size in enumerate(plan.spec_mesh.sizes):
            if size > 1:
                yield from _inside(plan, graph, op, axis, of_parts)


def _inside(plan: Plan, graph: Graph, op: Op, axis: int, of_parts: frozenset[str]) -> Iterator[Collective]:
    chosen, call = plan.ops[op.name], graph.calls[op.name]
    column = tuple(s[axis] for s in chosen.inputs), tuple(s[axis] for s in chosen.outputs)
    row = next((r for r in rows_of(graph, op, of_parts) if (r.inputs, r.outputs) == column), None)
    for inner in row.inner if row is not None else ():
        metas, specs = (call.inputs, chosen.inputs) if inner.tensor.startswith("in") else (call.outputs, chosen.outputs)
        i = int(inner.tensor.lstrip("inout"))
        meta = metas[i]
        assert meta is not None, f"{op.name}: a collective inside sends {inner.tensor}, which is not there"
        local, dtype = local_shape(meta.logical_shape, specs[i], plan.spec_mesh.sizes), inner.dtype or meta.dtype
        nbytes = inner.numel(local) * dtype.itemsize
        yield Collective(inner.kind, plan.spec_mesh.names[axis], nbytes, 0.0, op.phase, op.name, op.name, inner.reduce_op,
                         str(dtype).removeprefix("torch."), False, True, op.module, op.source)
