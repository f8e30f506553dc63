"""Legal plans without a search: rows drawn per op and mesh axis, and the copies they call for."""
from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from autoshard.base.graph import Graph, Op
from autoshard.base.mesh import Mesh
from autoshard.base.plan import Copy, OpPlan, Plan, StagePlan
from autoshard.base.roles import Role
from autoshard.base.spec import R, Spec, divides, is_partial, replicated
from autoshard.errors import LoweringError
from autoshard.rules import registry

Pick = Callable[[Op, list[OpPlan]], OpPlan]


def random_plan(graph: Graph, mesh: Mesh, route, seed: int = 0, stored: Mapping[str, Spec] | None = None,
                inputs: Mapping[str, Spec] | None = None, outputs: str = "replicate") -> Plan:
    """Every op runs under a random strategy that the redistributions can reach."""
    rng = random.Random(seed)
    ops: dict[str, OpPlan] = {}
    for op in graph.ops:
        choices = _choices(op, graph, mesh, ops, stored or {}, inputs or {}, outputs)
        rng.shuffle(choices)
        ops[op.name] = next(c for c in choices if _reachable(op, c, graph, ops, route))
    return plan_of(graph, mesh, ops, rng)


def replicated_plan(graph: Graph, mesh: Mesh) -> Plan:
    whole = replicated(mesh)
    ops = {op.name: OpPlan((whole,) * len(op.refs), (whole,) * len(op.outputs)) for op in graph.ops}
    return plan_of(graph, mesh, ops)


def plan_of(graph: Graph, mesh: Mesh, ops: Mapping[str, OpPlan], rng: random.Random | None = None) -> Plan:
    """The plan with these specs: copies are made where read; with `rng` some are kept for backward."""
    copies: dict[tuple, Copy] = {}
    for op in graph.ops:
        for ref, spec in zip(op.refs, ops[op.name].inputs, strict=True):
            if spec != ops[ref.op].outputs[ref.index]:
                forward = copies.get((ref, "forward", spec))
                kept = op.phase == "backward" and forward and rng and rng.random() < 0.5
                copies.setdefault((ref, op.phase, spec), Copy(str(ref), op.phase, spec, "kept" if kept else "made"))
    placements = {op.target: ops[op.name].outputs[0] for op in graph.of_kind("param", "buffer")}
    return Plan(graph.hash, mesh, {}, {}, {"training": graph.training}, ops, placements, tuple(copies.values()), (), (), {}, (StagePlan(),),
                0.0, 0.0, 0.0, "hand-made")


def _choices(op: Op, graph: Graph, mesh: Mesh, ops: Mapping[str, OpPlan], stored: Mapping[str, Spec],
             inputs: Mapping[str, Spec], outputs: str) -> list[OpPlan]:
    whole = replicated(mesh)
    if op.kind in ("param", "buffer", "input"):
        fixed = {**stored, **inputs}.get(op.target)
        mutated = op.kind == "buffer" and op.target in graph.outputs(Role.MUTATION)
        specs = [fixed] if fixed else [whole] if mutated else _shards(op.outputs[0], mesh)
        return [OpPlan((), (s,)) for s in specs]
    if op.kind == "tangent":
        spec = ops[graph.ties[op.name]].inputs[0]
        return [OpPlan((), (spec,))]
    if op.kind == "output":
        if op.target.role is Role.USER:
            spec = whole if outputs == "replicate" else next(
                (tuple(R if is_partial(p) else p for p in ops[r.op].outputs[r.index]) for r in op.refs), whole)
            return [OpPlan((spec,), ())]
        return [OpPlan((ops[graph.ties[op.name]].outputs[0] if op.name in graph.ties else whole,), ())]
    return _strategies(graph, op, mesh)


def _shards(meta, mesh: Mesh) -> list[Spec]:
    specs: list[Spec] = [()]
    for _ in mesh.sizes:
        specs = [(*s, p) for s in specs for p in (R, *(d for d in range(meta.ndim) if d not in meta.part_dims))]
    return [s for s in specs if divides(meta.logical_shape, s, mesh.sizes)]


def _strategies(graph: Graph, op: Op, mesh: Mesh) -> list[OpPlan]:
    call = graph.calls[op.name]
    combos = [((),) * (len(call.inputs) + len(call.outputs))]
    for _ in mesh.sizes:
        combos = [tuple((*spec, p) for spec, p in zip(c, (*row.inputs, *row.outputs), strict=True))
                  for c in combos for row in registry.rows(call)]
    metas = (*call.inputs, *call.outputs)
    legal = [c for c in combos if all(m is None or divides(m.logical_shape, s, mesh.sizes)
                                      for s, m in zip(c, metas, strict=True))]
    n = len(call.inputs)
    return [OpPlan(c[:n], c[n:]) for c in legal]


def _reachable(op: Op, chosen: OpPlan, graph: Graph, ops: Mapping[str, OpPlan], route) -> bool:
    for ref, spec in zip(op.refs, chosen.inputs, strict=True):
        own, meta = ops[ref.op].outputs[ref.index], graph.meta(ref)
        if own != spec and ref in registry.private_values(graph):
            return False
        try:
            route(meta.logical_shape, meta.dtype, own, spec)
        except LoweringError:
            return False
    return True
