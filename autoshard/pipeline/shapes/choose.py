"""Mesh, micro-batches, schedule and cuts where they are left open: the shapes that there are, tried at prices of blocks (`decide.py`), and the
best of them planned as they are, also with cuts that are even by the seconds of blocks where blocks are few: the price of a short stage leaves out
what its neighbours make of it. No pipeline, and no micro-batches, are among the shapes."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np

from autoshard.base.mesh import Mesh
from autoshard.base.plan import Plan, TriedShape
from autoshard.cost.cluster import Cluster
from autoshard.decide.pipeline_options import AUTO, Pipeline
from autoshard.errors import InfeasibleError, UsageError
from autoshard.pipeline.cutting.blocks import Blocks
from autoshard.pipeline.cutting.cut_points import names_of
from autoshard.pipeline.microbatches.batch import Batch
from autoshard.pipeline.pipelined import submesh
from autoshard.pipeline.shapes.cut_search import TRIED, search_cuts, with_even_cuts
from autoshard.pipeline.shapes.decide import TOLERANCE, Tried, ranked, try_shapes
from autoshard.pipeline.shapes.mesh_prices import MeshPricer, Searches, Sizes, traced_count
from autoshard.pipeline.shapes.meshes import CHUNKS, Room, Shape, Slot, shapes

PLANNED, FINALISTS = 2, 6
"""So many shapes are planned, of deep models one; if they do not fit, up to so many."""
FEW, WANTED = 8, 0.05
"""Of so many devices shapes are searched as closely as `TOLERANCE` says. With more of them there are many shapes: those that bounds leave less
than this part of a step to gain are not searched. Where no stages are asked for, nothing is left out for that."""
DEEP = 48
"""Blocks of a model of which shapes without stages are priced by blocks first, like all others: a search of so many takes longer than four
short ones."""
LONG, FINE = 8, 0.02
"""Blocks of a model, of which a shape of three axes takes minutes to search: it is not where bounds leave less than this part of a step to gain."""
AMPLE = 1e15
"""Bytes that no rank uses."""
PlanShape = Callable[[Mesh, Pipeline, Sequence[float]], Plan]
"""(mesh, options with nothing left open, seconds that a byte may cost its stages) -> the plan. Raises InfeasibleError."""


@dataclass(frozen=True)
class Asked:
    """`mesh` given, and the number of micro-batches left open; or any mesh of `devices`. `limit`: bytes a rank may use. `thorough`: meshes of three
    axes too, and shapes that can gain little."""

    devices: int
    mesh: Mesh | None
    options: Pipeline
    cluster: Cluster
    limit: float
    thorough: bool = False

    def __post_init__(self) -> None:
        o = self.options
        fixed = {"cuts": o.cuts != AUTO, "layout": bool(o.layout), "seeds for stages": bool(o.pinned),
                 f"schedule={o.schedule!r}": o.schedule.endswith(".csv")}
        if what := next((name for name, given in fixed.items() if given), None):
            raise UsageError(f"{what} belong to a mesh and a number of micro-batches; give these too, or leave out {what}")

    def mesh_of(self, slot: Slot) -> Mesh:
        """The mesh of a stage."""
        if self.mesh is None:
            return _named(("dp", slot.dp), ("mp", slot.mp), ("tp", slot.tp)) or Mesh(("dp",), (1,))
        return submesh(self.mesh, self.options.axis) if self.options.axis in self.mesh.names else self.mesh

    def whole_mesh(self, shape: Shape) -> Mesh:
        if self.mesh is not None:
            return self.mesh
        slot = shape.slot
        return _named((self.options.axis, shape.pp), ("dp", slot.dp), ("mp", slot.mp), ("tp", slot.tp)) or Mesh(("dp",), (1,))

    def shapes(self, rows: int, blocks: int, whole: bool) -> list[Shape]:
        """`whole`: without stages and micro-batches alone. Raises MeshError where nothing divides."""
        o = self.options
        whole = whole or self.mesh is None and o.microbatches == 1
        count = 1 if whole else None if o.microbatches == AUTO else o.count
        schedules = TRIED if o.schedule == AUTO else (o.schedule,)
        room = Room(self.devices, self._most_tp, rows, blocks, 1 if whole else None, microbatches=count, schedules=schedules,
                    chunks=CHUNKS if o.chunks == AUTO else (int(o.chunks),), warmups=False, axes=3 if self.thorough else 2)
        if self.mesh is None:
            return shapes(room)
        pp = o.stages(self.mesh)
        return shapes(replace(room, pp=pp, dp=1, tp=self.mesh.size // pp))

    @property
    def tolerance(self) -> float:
        if self.thorough or self.mesh is None and self.options.microbatches == 1:  # of a mesh alone there are few
            return 0.0
        return TOLERANCE if self.mesh is not None or self.devices <= FEW else WANTED

    @property
    def _most_tp(self) -> int:
        return int(min(self.devices, self.cluster.links[0].devices))

    def options_of(self, tried: Tried, blocks: Blocks) -> Pipeline:
        """With nothing left open."""
        shape = tried.shape
        if shape.pp == 1:
            return replace(self.options, microbatches=shape.microbatches, schedule=AUTO, chunks=AUTO)
        return replace(self.options, microbatches=shape.microbatches, schedule=shape.schedule, chunks=shape.chunks,
                       cuts=names_of(blocks, tried.cuts[1:-1]))


def _named(*axes: tuple[str, int]) -> Mesh | None:
    """The mesh of the axes with several ranks."""
    found = [(name, size) for name, size in axes if size > 1]
    return Mesh(tuple(n for n, _ in found), tuple(s for _, s in found)) if found else None


def choose(batch: Batch, asked: Asked, searches: Searches, plan_shape: PlanShape, tell: Callable[[str], None] = lambda text: None) -> Plan:
    """The cheapest plan of the shapes that are planned; its `shapes` have a line for every shape. `tell` hears of shapes as they are looked at.
    Raises InfeasibleError where none fits, UsageError."""
    rows = batch.rows(asked.options)
    pricer, why = _pricer(batch, asked, searches, rows)
    blocks, plans, failures = pricer.sizes.first.blocks, {}, []

    def planned(tried: Tried) -> Plan:
        tell(f"{tried.shape}: planning it")
        mesh, rates, options = asked.whole_mesh(tried.shape), pricer.rates(tried), asked.options_of(tried, blocks)
        ways = [options]
        if tried.shape.pp > 1 and not deep:
            ways.append(with_even_cuts(options, blocks, asked.cluster, tried.shape.pp * tried.shape.chunks))
        plans[tried.shape] = plan = search_cuts(tuple(dict.fromkeys(ways)), lambda way: plan_shape(mesh, way, rates))
        return plan

    def plan_whole(shape: Shape) -> Tried:
        try:
            plan = planned(Tried(shape, 0.0))
        except InfeasibleError as e:
            failures.append(e)
            raise
        return Tried(shape, plan.bound_s, plan.objective_s, memory=plan.memory.get("total"), planned=True)

    deep = len(pricer.labels) >= DEEP and not why
    tried = try_shapes(pricer, asked.shapes(rows, len(pricer.labels), bool(why)), asked.limit, tell, None if deep else plan_whole, asked.tolerance,
                       FINE if len(pricer.labels) >= LONG else 0.0)
    staged = 0
    for candidate in ranked(tried)[:FINALISTS]:
        best = min((plan.objective_s for plan in plans.values()), default=np.inf)
        if candidate.shape not in plans and staged < (1 if deep else PLANNED) and (candidate.seconds or 0.0) < best:
            try:
                planned(candidate)
                staged += 1
            except InfeasibleError as e:
                failures.append(e)
    if not plans:
        raise failures[0] if failures else InfeasibleError(_nothing_fits(tried, asked), proven=all(t.bound == np.inf for t in tried))
    return _chosen(asked, [_proven(t, plans.get(t.shape)) for t in tried], plans, why)


def _proven(tried: Tried, plan: Plan | None) -> Tried:
    """Without stages, the bound of a plan holds for all plans of its shape."""
    return replace(tried, bound=max(tried.bound, plan.bound_s)) if plan is not None and tried.shape.pp == 1 else tried


def _pricer(batch: Batch, asked: Asked, searches: Searches, rows: int) -> tuple[MeshPricer, str]:
    """Of micro-batches; where there can be none, of the batch, and why."""
    def made(count: int) -> MeshPricer:
        return MeshPricer(Sizes(batch, asked.options, rows, count), asked.devices, asked.mesh_of, asked.cluster, asked.limit, searches)

    if not batch.whole.graph.training:
        return made(1), "inference has no micro-batches"
    try:
        return made(traced_count(rows)), ""
    except UsageError as e:
        if asked.options.microbatches not in (1, AUTO) or asked.mesh is not None and asked.options.stages(asked.mesh) > 1:
            raise
        return made(1), str(e)


def _chosen(asked: Asked, tried: Sequence[Tried], plans: dict[Shape, Plan], why: str) -> Plan:
    best = min(plans, key=lambda shape: plans[shape].objective_s)
    plan = plans[best]
    bound = min(plan.objective_s, *(t.bound for t in tried))
    notes = [f"mesh, micro-batches, schedule and cuts were chosen among {len(tried)} shapes of {asked.devices} devices; bound and gap are for all "
             "of them"] + ([f"no stages and no micro-batches: {why}"] if why else [])
    status = plan.status if plan.interrupted else "the cheapest of the shapes that were tried"
    return replace(plan, bound_s=bound, gap=1.0 - bound / plan.objective_s if plan.objective_s else 0.0, status=status,
                   notes=(*plan.notes, *notes), shapes=tuple(_line(asked, t, plans.get(t.shape), t.shape == best) for t in tried))


def _line(asked: Asked, tried: Tried, plan: Plan | None, chosen: bool) -> TriedShape:
    shape, bound = tried.shape, min(tried.bound, plan.objective_s if plan else tried.bound)
    return TriedShape(str(asked.whole_mesh(shape)), shape.microbatches, shape.schedule if shape.pp > 1 else "", shape.chunks,
                      bound if isfinite(bound) else None, plan.objective_s if plan else None, None if tried.planned else tried.seconds,
                      plan.memory.get("total") if plan else tried.memory, tried.why, chosen)


def _nothing_fits(tried: Sequence[Tried], asked: Asked) -> str:
    return (f"none of {len(tried)} shapes of {asked.devices} devices was found to fit in {asked.limit / 2**30:.4g} GiB on a device; give more "
            "devices, a smaller batch, or state on the host")
