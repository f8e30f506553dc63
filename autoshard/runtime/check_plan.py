"""Checks that a plan belongs to this program. A plan may come from a file, so it is checked before it is run."""
from __future__ import annotations

from collections.abc import Sequence

from autoshard.base import quantities
from autoshard.base.fine_mesh import refined
from autoshard.base.graph import Graph, Op
from autoshard.base.mesh import Mesh
from autoshard.base.plan import OpPlan, Plan
from autoshard.base.roles import Role
from autoshard.base.spec import Spec, divides, format_spec, is_inner, is_one_nesting, is_partial, lie_alike, may_be_stored, split_by
from autoshard.decide.options import Options
from autoshard.errors import PlanError
from autoshard.program.flow import casts_of_parts, laid_as_stored, rows_of
from autoshard.rules import registry
from autoshard.seeds.seeds import resolve_seeds

REPLAN = "plan the model again"


def check_fits(plan: Plan, graph: Graph, mesh: Mesh) -> None:
    """Raises PlanError for a plan of another mesh or program, or with a strategy that its op does not have: that
    would compute something else."""
    check_subject(plan, graph, mesh)
    mesh = refined(mesh, plan.finer)
    known: dict[object, str] = {}
    stored = laid_as_stored(graph)
    of_parts = casts_of_parts(graph)
    for op in graph.ops:
        if op.name not in plan.ops:
            raise PlanError(f"the plan has nothing about {op.where}; {REPLAN}")
        chosen = plan.ops[op.name]
        key = (graph.calls[op.name] if op.kind == "call" else op.name, chosen, op.name in of_parts, op.name in stored)
        if key not in known:
            known[key] = _wrong(op, chosen, graph, mesh, of_parts)
        if known[key]:
            raise PlanError(f"the plan's strategy for {op.where} {known[key]}; {REPLAN}")
    for ref in registry.private_values(graph):
        for reader, i in graph.users.get(ref, ()):
            if plan.ops[reader].inputs[i] != plan.ops[ref.op].outputs[ref.index]:
                raise PlanError(f"the plan's strategy for {graph.op(reader).where} takes other rows than {graph.op(ref.op).where} saves: "
                                f"they must run the same way; {REPLAN}")
    _check_storage(plan, graph, mesh)
    if unknown := sorted(set(plan.offload) - {op.target for op in graph.of_kind("param")}):
        raise PlanError(f"the plan keeps the optimizer state of {unknown[0]} on the host, which is no parameter; {REPLAN}")


def check_subject(plan: Plan, graph: Graph, mesh: Mesh) -> None:
    """Raises PlanError for a plan of another mesh or program."""
    if plan.mesh != mesh:
        raise PlanError(f"the plan is for mesh {plan.mesh}, this run has mesh {mesh}; plan the model for this mesh")
    if plan.graph_hash != graph.hash:
        micro = ", the number of micro-batches" if plan.pipeline or graph.microbatches > 1 else ""
        raise PlanError(f"the plan is for another program (graph {plan.graph_hash}, this one is {graph.hash}): the model, the "
                        f"shapes or dtypes of its inputs, the loss{micro} or the precision differ; plan again")


def check_asked(plan: Plan, graph: Graph, options: Options) -> None:
    """Raises PlanError where a plan that the user gives takes more memory than the budget given with it, or lays tensors otherwise than the seeds
    given with it; SeedError for a seed that matches nothing."""
    limit, most = options.memory_budget, max((stage.total for stage in plan.stages), default=0.0)
    if limit is not None and most > limit:
        raise PlanError(f"the given plan needs {quantities.size(most)} on a rank, and memory_budget is {quantities.size(limit)}; "
                        "plan the model with that budget, or leave memory_budget out")
    if plan.pipeline or options.marks == dict(plan.seeds):
        return
    mesh = refined(plan.mesh, plan.finer)
    seeds = resolve_seeds(graph, plan.mesh, options.seeds).on(mesh)
    found = {name: (plan.ops[name].outputs or plan.ops[name].inputs)[0] for name in seeds.specs}
    found |= {(name, i): plan.ops[name].inputs[i] for name, i in seeds.reads}
    for key, allowed in (*seeds.specs.items(), *seeds.reads.items()):
        if found[key] not in allowed:
            raise PlanError(f"the given plan has {format_spec(found[key])} where seed {seeds.origins[key]} is given with it; plan the model with "
                            "that seed, or leave it out")


def _wrong(op: Op, chosen: OpPlan, graph: Graph, mesh: Mesh, of_parts: frozenset[str]) -> str:
    """Why an op cannot run so, or ""."""
    metas = (*(graph.meta(r) for r in op.refs), *op.outputs)
    specs = (*chosen.inputs, *chosen.outputs)
    if len(chosen.inputs) != len(op.refs) or len(specs) != len(metas):
        return f"has {len(chosen.inputs)} inputs and {len(chosen.outputs)} outputs, the op has {len(op.refs)} and {len(op.outputs)}"
    for spec, meta in zip(specs, metas, strict=True):
        if len(spec) != mesh.ndim:
            return f"has the placement {format_spec(spec)}, and the mesh {mesh.ndim} axes"
        if any(map(is_inner, spec)) and not (op.name in laid_as_stored(graph) and is_one_nesting(spec) and len(set(specs)) == 1):
            return f"has the placement {format_spec(spec)}; inner shards are inside of another axis, and of parameters and their gradients alone"
        if meta is not None and not divides(meta.logical_shape, spec, mesh.sizes):
            return f"has the placement {format_spec(spec)}, which does not split a tensor of shape {meta.logical_shape} evenly"
        if meta is not None and any(split_by(p) in meta.part_dims for p in spec):
            return f"has the placement {format_spec(spec)}, which hands out whole parts (q, k and v) of a dim that is made of parts"
        if op.kind != "call" and mesh.as_whole(spec) is None:
            return f"has the placement {format_spec(spec)} on axes {', '.join(mesh.names)}, which no placement on mesh {mesh.whole} says"
        if meta is not None and op.kind == "param" and not may_be_stored(meta, spec, mesh):
            return f"has the placement {format_spec(spec)}, in which DTensor would lay other pieces of a tensor of shape {meta.true_shape}"
    if op.kind != "call":
        return "leaves a stored tensor Partial" if any(is_partial(p) for s in specs for p in s) else ""
    rows = {(r.inputs, r.outputs) for r in rows_of(graph, op, of_parts)}
    for axis, size in enumerate(mesh.sizes):
        if size > 1 and tuple(tuple(map(split_by, _column(s, axis))) for s in (chosen.inputs, chosen.outputs)) not in rows:
            return (f"on mesh axis {mesh.names[axis]!r} ({_text(chosen.inputs)} -> {_text(chosen.outputs)}) is none that "
                    "the op's sharding rule has")
    if not registry.takes_pieces(graph.calls[op.name], chosen.inputs, mesh.sizes):
        return f"({_text(chosen.inputs)}) cuts its inputs into rows that the op's kernel does not take"
    return ""


def _check_storage(plan: Plan, graph: Graph, mesh: Mesh) -> None:
    """Gradients and new buffers are handed out as their parameters and buffers are stored, those of inputs as they come in."""
    stored = {op.target: plan.ops[op.name].outputs[0] for op in graph.of_kind("param", "buffer")}
    for name, spec in stored.items():
        whole = mesh.as_whole(spec)
        if plan.placements.get(name) != whole:
            raise PlanError(f"the plan stores {name} as {format_spec(plan.placements.get(name, ()))}, and its ops read "
                            f"{format_spec(whole or spec)}; {REPLAN}")
    stored |= {op.target: plan.ops[op.name].outputs[0] for op in graph.of_kind("input")}
    metas = {op.target: op.outputs[0] for op in graph.of_kind("param", "buffer", "input")}
    for op in graph.of_kind("output"):
        name = op.target.name
        if op.target.role is not Role.USER and name in stored and not lie_alike(metas[name], graph.meta(op.refs[0]), stored[name],
                                                                                plan.ops[op.name].inputs[0]):
            raise PlanError(f"the plan hands out {op.target} as {format_spec(plan.ops[op.name].inputs[0])}, and {name} is stored as "
                            f"{format_spec(stored[name])}; {REPLAN}")


def _column(specs: Sequence[Spec], axis: int) -> tuple[int, ...]:
    return tuple(s[axis] for s in specs)


def _text(specs: Sequence[Spec]) -> str:
    return " | ".join(map(format_spec, specs))
