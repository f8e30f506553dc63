"""A plan kept for other shapes of its program: the same strategies, priced at the new sizes. Nothing is searched.

Whether that is good enough is judged by an estimate of what a search would find: between two sizes that were searched it lies on the line through
their steps, below the smallest in proportion, above the largest at that one's step. That is a lower bound if a step takes c + a n seconds under
every plan, where n counts the elements of the inputs: the least of such lines over all plans bends downwards only. Attention's
n^2 bends the other way, so with long sequences it is an estimate.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np

from autoshard.base.fine_mesh import refined
from autoshard.base.graph import Graph, Op, Ref
from autoshard.base.mesh import Mesh
from autoshard.base.plan import OpPlan, Plan, in_flight
from autoshard.base.spec import Spec
from autoshard.cost.budget import Budget
from autoshard.cost.cluster import Cluster
from autoshard.decide.make_plan import Chosen, collectives, fallbacks, memory_of, price_windows
from autoshard.decide.notes.shown_tensors import layouts
from autoshard.decide.options import Options
from autoshard.lower.seconds import saved_by_buckets
from autoshard.play.footprint import Footprints
from autoshard.program.flow import casts_of_parts, rows_of
from autoshard.recompute.rewrite import with_recompute
from autoshard.space.cost_table import Training, build_cost_table
from autoshard.space.strategies import Strategies, StrategySet

KEPT = "kept from another shape"
"""The status of such a plan; nothing is proven about it."""


@dataclass(frozen=True, eq=False)
class Known:
    """A variant that runs: its plan, its graph (as the plan runs it, recomputation and all), and how many elements its inputs have."""

    plan: Plan
    graph: Graph

    @property
    def elements(self) -> int:
        return elements(self.graph)

    @property
    def searched(self) -> bool:
        return self.plan.status != KEPT


def elements(graph: Graph) -> int:
    """Of all inputs together."""
    return sum(int(np.prod(op.outputs[0].logical_shape)) for op in graph.of_kind("input"))


def carried(known: Known, graph: Graph) -> Plan | None:
    """The plan of a variant as one for `graph`, not priced; None where the program is another one. Whether its strategies divide the new
    sizes is still to be checked."""
    if _structure(with_recompute(graph, known.plan.recompute)) != _structure(known.graph):
        return None
    return replace(known.plan, graph_hash=graph.hash)


def _structure(graph: Graph) -> list[tuple[Any, ...]]:
    return [(op.name, op.kind, str(op.target), op.refs, op.phase, tuple(m and (m.ndim, m.part_dims, m.dtype) for m in op.outputs))
            for op in graph.ops]


def least_step(known: Iterable[Known], n: int) -> float:
    """What a search at `n` elements would find at least, by the estimate above, from the variants that were searched."""
    points = sorted((k.elements, k.plan.objective_s) for k in known if k.searched)
    below = max((p for p in points if p[0] <= n), default=None)
    above = min((p for p in points if p[0] >= n), default=None)
    if below is None or above is None:
        return above[1] * n / above[0] if above else below[1] if below else 0.0
    share = (n - below[0]) / (above[0] - below[0]) if above[0] > below[0] else 0.0
    return below[1] + share * (above[1] - below[1])


def excess(known: Iterable[Known], training: bool, n: int, seconds: float) -> float:
    """The share that a step of so many seconds at `n` elements is above `least_step`, of the variants that train or of those that do not; inf
    where none of them was searched."""
    least = least_step([k for k in known if k.graph.training == training], n)
    return seconds / least - 1.0 if least else inf


def kept(plans: Sequence[Plan], known: Sequence[Known], graph: Graph, mesh: Mesh, cluster: Cluster, training: Training, budget: Budget,
         within: float) -> Plan | None:
    """The cheapest of `plans`, which run `graph`, at its prices; None where it is more than the share `within` above `least_step`, or does not
    fit in memory: then search."""
    priced = [_priced(plan, graph, refined(mesh, plan.finer), cluster, training, budget,
                      any(k.plan.ops is plan.ops and _smaller(graph, k.graph) for k in known)) for plan in plans]
    best = min(priced, key=lambda plan: plan.objective_s, default=None)
    if best is None or (over := excess(known, graph.training, elements(graph), best.objective_s)) > within:
        return None
    return replace(best, notes=(f"kept from a variant with other shapes, estimated at most {max(over, 0.0):.1%} above what a search would find",))


def _smaller(graph: Graph, other: Graph) -> bool:
    """Whether no dim of an input is larger than in the other graph, and some is smaller: so is every tensor of the program then."""
    pairs = [(a, b) for one, two in zip(graph.of_kind("input"), other.of_kind("input"), strict=True)
             for a, b in zip(one.outputs[0].logical_shape, two.outputs[0].logical_shape, strict=True)]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def _priced(plan: Plan, graph: Graph, mesh: Mesh, cluster: Cluster, training: Training, budget: Budget, fits: bool) -> Plan:
    """The plan with seconds and bytes of `graph`; infinitely dear where it does not fit. Where it is known that it `fits`, since it does with
    larger shapes, bytes stay those: playing a step's memory takes most of the time here."""
    whole = with_recompute(graph, plan.recompute)
    training = replace(training, offload=False, on_their_way=in_flight(plan.settings))
    table = build_cost_table(whole, mesh, cluster, strategies_of(plan, whole, mesh), training)
    bare = Chosen(table, dict.fromkeys(whole.by_name, 0), ())
    names = {str(Ref(op.name, i)): Ref(op.name, i) for op in whole.ops for i in range(len(op.outputs))}
    chosen = replace(bare, copies=tuple((names[c.value], bare.out_spec(names[c.value]), c) for c in plan.copies))
    step = None if fits else memory_of(table, plan, Footprints(mesh, cluster))
    predicted, windows = price_windows(chosen, step and saved_by_buckets(step.order, whole, plan, cluster))
    stage = replace(plan.stages[0], windows=windows, once_s=predicted["optimizer_s"])
    if step is not None:
        stage = replace(stage, memory=step.summary(budget), timeline=step.moments(), largest=step.largest())
    seconds = predicted["step_s"] if step is None or budget.holds(step.peak) else inf
    return replace(plan, predicted=predicted, stages=(stage,), objective_s=seconds, bound_s=0.0, gap=1.0, status=KEPT, worth=None,
                   layouts=layouts(whole, plan.ops, plan.placements), collectives=collectives(chosen), fallbacks=fallbacks(chosen), search={})


def repriced(plan: Plan, graph: Graph, mesh: Mesh, cluster: Cluster, options: Options) -> Plan:
    """A plan of `graph` at the prices of another profile. Its memory stays as it is said to be."""
    training = Training(options.optimizer, graph.training)
    return _priced(plan, graph, refined(mesh, plan.finer), cluster, training, Budget.of(cluster.device, options.memory_limit(cluster)), True)


def strategies_of(plan: Plan, graph: Graph, mesh: Mesh) -> Strategies:
    """The one strategy that the plan has, per op; equal ones are one object, so that they are priced once."""
    made: dict[Any, StrategySet] = {}
    out: dict[str, StrategySet] = {}
    of_parts, away = casts_of_parts(graph), frozenset(plan.offload)
    for op in graph.ops:
        chosen = plan.ops[op.name]
        key = (graph.calls[op.name] if op.kind == "call" else (op.kind, op.outputs or graph.meta(op.refs[0])), chosen, op.name in of_parts,
               op.target in away)
        if key not in made:
            made[key] = _one(op, chosen, graph, mesh, of_parts, away)
        out[op.name] = made[key]
    return out


def _one(op: Op, chosen: OpPlan, graph: Graph, mesh: Mesh, of_parts: frozenset[str], away: frozenset[str]) -> StrategySet:
    ins, outs = (np.array(specs, dtype=np.int8).reshape(1, len(specs), mesh.ndim) for specs in (chosen.inputs, chosen.outputs))
    metas = tuple(graph.meta(r) for r in op.refs)
    on_host = np.array([True]) if op.kind == "param" and op.target in away else None
    if op.kind != "call":
        return StrategySet(ins, outs, metas, op.outputs, on_host=on_host)
    rows = rows_of(graph, op, of_parts)
    by_axis = {(row.inputs, row.outputs): i for i, row in reversed(list(enumerate(rows)))}
    picked = [by_axis.get((_column(chosen.inputs, a), _column(chosen.outputs, a)), 0) for a in range(mesh.ndim)]
    return StrategySet(ins, outs, metas, op.outputs, graph.calls[op.name], rows, np.array([picked]))


def _column(specs: Sequence[Spec], axis: int) -> tuple[int, ...]:
    return tuple(s[axis] for s in specs)


def keep_plan(options: Options, profile: Cluster, plans: Sequence[Plan], known: Sequence[Known], graph: Graph, mesh: Mesh) -> Plan | None:
    """Of `plans`, made for other shapes, the one to run `graph` with, priced anew; None: search."""
    budget = Budget.of(profile.device, options.memory_limit(profile))
    return kept(plans, known, graph, mesh, profile, Training(options.optimizer, graph.training), budget, options.running.keep_within)
