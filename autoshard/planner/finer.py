"""Axes in parts (base/fine_mesh.py): which, where the user leaves it open, and plans on them beside the plan on the axes as they are.

Units are coarser on more axes, so a plan on parts may be dearer than one without. Both are made, each is a start of those after it where it
is a plan over their units too, and the cheapest is taken."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import gcd, prod
from typing import Any

from autoshard.base.fine_mesh import AUTO, NEVER, parse_parts, refined
from autoshard.base.graph import Graph
from autoshard.base.mesh import Mesh
from autoshard.base.plan import Plan
from autoshard.base.spec import Spec
from autoshard.cost.cluster import Cluster
from autoshard.decide.options import Options
from autoshard.decide.phase_timer import PhaseTimer
from autoshard.errors import InfeasibleError
from autoshard.planner.one_stage import decide, prices
from autoshard.program.calling import Traced
from autoshard.space.cost_table import CostTable

MOST = 2
"""Meshes with an axis in parts that are tried where it is left open: both orders of one pair of parts."""
VIEWS = ("aten.view", "aten._unsafe_view", "aten.reshape")


def finer_meshes(graph: Graph, mesh: Mesh, asked: str) -> tuple[Mesh, ...]:
    """The meshes with axes in parts that `asked` (see `Options.refine_axes`) is about. Raises MeshError for parts that the mesh cannot have."""
    if asked == NEVER:
        return ()
    if asked != AUTO:
        return (refined(mesh, parse_parts(asked)),)
    found = dict.fromkeys((axis, parts) for n in head_counts(graph) for axis, parts in _parts_for(n, mesh))
    return tuple(refined(mesh, {axis: parts}) for axis, parts in list(found)[:MOST])


def head_counts(graph: Graph) -> tuple[int, ...]:
    """Into how many heads views take the last dim of a value apart, the largest first: queries before keys and values."""
    return tuple(sorted({n for op in graph.of_kind("call") if op.phase == "forward" and str(op.target).startswith(VIEWS)
                         for n in _heads(graph.meta(op.refs[0]).shape, op.outputs[0].shape)}, reverse=True))


def _heads(before: Sequence[int], after: Sequence[int]) -> Sequence[int]:
    """The dims but for the last one that the last dim is taken apart into; none where it stays one."""
    for count in range(1, len(after) + 1 if before else 0):
        if prod(after[-count:]) >= before[-1]:
            return after[-count:-1] if prod(after[-count:]) == before[-1] else ()
    return ()


def _parts_for(heads: int, mesh: Mesh) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Axes with two parts, of which the heads divide by one, in both orders, the widest axis first."""
    for axis, size in sorted(zip(mesh.names, mesh.sizes, strict=True), key=lambda a: -a[1]):
        factor = gcd(heads, size)
        if 1 < factor < size:
            yield from ((axis, (factor, size // factor)), (axis, (size // factor, factor)))


def plan_finer(traced: Traced, mesh: Mesh, options: Options, *, clock: PhaseTimer, fixed: Mapping[str, Spec] | None, profile: Cluster,
               coarser: Sequence[Plan] = (), **how: Any) -> Plan:
    """The cheapest of the plan on `mesh` and those on its finer meshes, with a note. The time limit is for all of them: each search has what is left.
    Raises InfeasibleError where none fits, MeshError."""
    meshes, spent = finer_meshes(traced.graph, mesh, options.refine_axes), clock.seconds.get("search", 0.0)
    made: list[Plan] = []
    failure: InfeasibleError | None = None
    tried: list[Mesh] = []
    for on in (mesh, *meshes):
        left = options.time_limit - (clock.seconds.get("search", 0.0) - spent)
        if made and (made[-1].interrupted or left <= 0):
            break
        tried.append(on)
        within = replace(options, time_limit=max(left, 0.01 * options.time_limit))
        try:
            table = prices(traced, on, within, clock=clock, fixed=fixed, profile=profile)
            made.append(decide(table, within, clock=clock, coarser=(*coarser, *made), **how))
        except InfeasibleError as e:
            failure = failure or e
    if not made:
        assert failure is not None, "every mesh has a plan, or a reason why not"
        raise failure
    best = min(made, key=lambda plan: plan.objective_s)
    notes = (*best.notes, *_note(best, made, tried[1:], meshes[len(tried) - 1:]))
    return replace(best, notes=notes, timings=dict(clock.seconds))


def _note(best: Plan, made: Sequence[Plan], tried: Sequence[Mesh], untried: Sequence[Mesh]) -> Iterator[str]:
    """What finer axes brought."""
    missing = f"; {' and '.join(map(str, untried))}: not tried, the search ended before" if untried else ""
    asis = next((plan for plan in made if not plan.finer), None)
    if best.finer and asis is None:
        yield f"on mesh {best.mesh} as it is no plan was found that fits; this one takes its axes in parts ({best.spec_mesh}){missing}"
    elif best.finer and asis is not None:
        yield f"taking axes in parts ({best.spec_mesh}) makes the step {1 - best.objective_s / asis.objective_s:.2%} shorter{missing}"
    elif tried:
        yield f"axes in parts ({' and '.join(map(str, tried))}) bring nothing here{missing}"
    elif untried:
        yield f"axes are not taken in parts{missing}"


def plan_and_prices(traced: Traced, mesh: Mesh, options: Options, plan: Plan | None = None, *, clock: PhaseTimer,
                    **how: Any) -> tuple[Plan, CostTable]:
    """A plan and prices on its mesh: `plan`, else one that is searched with `how`."""
    if plan is None and options.refine_axes != NEVER:
        from autoshard.planner.stages import plan_traced

        plan = plan_traced(traced, mesh, options, clock=clock, **how)
    table = prices(traced, mesh if plan is None else plan.spec_mesh, options, clock=clock)
    return plan or decide(table, options, clock=clock, **how), table
