"""Seconds of a schedule, filled in per instruction and per collective, for whoever plays it; and what buckets save.

An instruction's seconds are those of the kernels that it runs: an op, or the copies that rearrange what a redistribution sends and
receives. Each of its collectives has its own. Together with the optimizer's update, and with small gradients priced as shares of calls, they
make up the objective (tests/lower/test_priced_schedule.py).
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import torch

from autoshard.base.graph import Call, Graph
from autoshard.base.mesh import Mesh
from autoshard.base.plan import OpPlan, Plan, in_flight
from autoshard.base.spec import Spec, local_shape
from autoshard.cost.cluster import Cluster
from autoshard.cost.compute import call_seconds, op_seconds
from autoshard.cost.fusion import NOTHING, Fused, untouched
from autoshard.cost.shared_calls import Together, share_seconds, small_gradients
from autoshard.lower.schedule import CollectiveCall, Instruction, Schedule
from autoshard.rules import registry
from autoshard.rules.family import Family


class Prices:
    """Seconds of collectives and copies on one mesh of a cluster. `small`: the gradients that are thought to share a call."""

    def __init__(self, mesh: Mesh, cluster: Cluster, small: Together | None = None) -> None:
        self.mesh, self.cluster, self.small = mesh, cluster, small
        self._known: dict[tuple[CollectiveCall, Together | None], float] = {}

    def of_call(self, call: CollectiveCall, others: Together | None = None) -> float:
        """`others`: with whom it may share one."""
        if (call, others) not in self._known:
            link = self.cluster.link_of(self.mesh, self.mesh.axes(call.axis))
            self._known[call, others] = share_seconds(call.kind, call.nbytes, others, link, self.cluster.device)
        return self._known[call, others]

    def of_copy(self, nbytes: int) -> float:
        """Reading so many bytes and writing them elsewhere."""
        return float(op_seconds(Family.COPY, 0, 2 * nbytes, torch.uint8, self.cluster.device)) if nbytes else 0.0

    def moved(self, move: Instruction) -> Instruction:
        """A redistribution with its seconds."""
        rearranged = [s.rearranged for steps in move.steps for s in steps]
        joined = [call.nbytes for call in move.calls if call.bucket]
        return replace(move, calls=tuple(replace(c, seconds=self.of_call(c)) for c in move.calls),
                       seconds=sum(map(self.of_copy, [*rearranged, *joined])))

    def planned(self, call: CollectiveCall, move: Instruction) -> float:
        """As the objective has it: reductions of small gradients are shares of calls."""
        return self.of_call(call, self.small if move.hideable else None)

    def saved(self, move: Instruction) -> float:
        """What the calls of a redistribution take less than the objective has for them, a copy into a bucket's buffer included. Below 0 where a
        small gradient finds nobody to share a call with."""
        return sum(sum(self.planned(c, move) for c in call.planned()) - self.of_call(call) - (self.of_copy(call.nbytes) if call.bucket else 0.0)
                   for call in move.calls)


def uneven_axes(call: Call, chosen: OpPlan, mesh: Mesh) -> tuple[int, ...]:
    """The mesh axes along which the data decides how much a rank computes and sends (`Row.uneven`)."""
    rows = registry.rows(call)
    if not any(row.uneven for row in rows):
        return ()
    specs = (*chosen.inputs, *chosen.outputs)
    of_uneven = {(*row.inputs, *row.outputs) for row in rows if row.uneven}
    return tuple(a for a, n in enumerate(mesh.sizes) if n > 1 and tuple(s[a] for s in specs) in of_uneven)


class _Computes:
    """Seconds of the ops of a plan with the load of the busiest rank, each form of a call priced once."""

    def __init__(self, graph: Graph, plan: Plan, cluster: Cluster) -> None:
        self.graph, self.plan, self.cluster = graph, plan, cluster
        self._known: dict[object, float] = {}

    @cached_property
    def _kept(self) -> Mapping[str, Fused]:
        return untouched(self.graph, self.cluster.device)

    def __call__(self, name: str) -> float:
        call, chosen, kept = self.graph.calls[name], self.plan.ops[name], self._kept.get(name, NOTHING)
        key = (call, chosen, kept)
        if key not in self._known:
            inputs = [self._shape(m.logical_shape, s) for m, s in zip(call.inputs, chosen.inputs, strict=True)]
            outputs = [None if m is None else self._shape(m.logical_shape, s) for m, s in zip(call.outputs, chosen.outputs, strict=True)]
            self._known[key] = float(call_seconds(call, inputs, outputs, self.cluster.device, kept)) * self.load(name)
        return self._known[key]

    def load(self, name: str) -> float:
        """What the busiest rank takes, over what a rank takes in an even load."""
        imbalance = self.cluster.device.imbalance
        return imbalance if imbalance != 1.0 and uneven_axes(self.graph.calls[name], self.plan.ops[name], self.plan.spec_mesh) else 1.0

    def _shape(self, shape: tuple[int, ...], spec: Spec) -> tuple[int, ...]:
        return local_shape(shape, spec, self.plan.spec_mesh.sizes)


def priced(order: Schedule, graph: Graph, plan: Plan, cluster: Cluster) -> Schedule:
    """The schedule of `plan` with seconds on a cluster. Waits have none: how long they take is up to what else runs."""
    prices, computes = Prices(plan.spec_mesh, cluster), _Computes(graph, plan, cluster)

    def with_seconds(i: Instruction) -> Instruction:
        if i.kind == "redistribute":
            return prices.moved(i)
        if i.kind == "wait":
            return i
        load = computes.load(i.op) if i.calls else 1.0
        return replace(i, seconds=computes(i.op), calls=tuple(replace(c, seconds=prices.of_call(c) * load) for c in i.calls))

    return replace(order, windows=tuple(replace(w, instructions=tuple(map(with_seconds, w.instructions))) for w in order.windows))


def saved_by_buckets(order: Schedule, graph: Graph, plan: Plan, cluster: Cluster) -> dict[str, float]:
    """Seconds by window that reductions of gradients take less than the objective says: small ones share calls, and how many do the objective does
    not know."""
    prices = Prices(plan.spec_mesh, cluster, small_gradients(graph, in_flight(plan.settings)))
    return {w.name: sum(prices.saved(i) for i in w.instructions if i.kind == "redistribute") for w in order.windows}
