"""Seconds for every strategy of every op, and for every change of layout on every edge.

Arrays are interned: equal ops share node costs, equal (shape, dtype, spec set, spec set) share edge tables.
"""
from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np

from autoshard import collectives
from autoshard.base.graph import Graph, Op, Ref, TensorMeta
from autoshard.base.mesh import Mesh
from autoshard.base.plan import IN_FLIGHT
from autoshard.base.roles import Role
from autoshard.base.spec import NOWHERE, R, Spec, local_shape
from autoshard.base.turns import Duty
from autoshard.cost import compute
from autoshard.cost.cluster import AxisLink, Cluster
from autoshard.cost.fusion import NOTHING, Fused, untouched
from autoshard.cost.memory import value_bytes
from autoshard.cost.redistribute import Redistribution, Step
from autoshard.cost.shared_calls import SMALL, UNKNOWN, Together, small_gradients
from autoshard.program import flow
from autoshard.rules import registry
from autoshard.rules.types import InnerCollective
from autoshard.seeds.seeds import Seeds
from autoshard.space.strategies import SpecIndex, Strategies, StrategySet, local_shape_array, with_host


@dataclass(frozen=True)
class Training:
    """What one step does besides the graph: its optimizer, whether gradients stay unreduced until backward is through, and whether
    optimizer state may lie on the host. `wire`: the links between the stages of a pipeline, over which ports send and receive;
    `in_flight`: micro-batches of which a stage has saved values at once; `duty`: all that its rank does in a step, for the timeline.
    `most`: how many are counted in flight, and how many of them have run a part of their backward, where stages are searched as the one of them that
    has most. `on_their_way`: bytes of gradients that may be, at once (`plan.IN_FLIGHT`). `floor`: the graph is a part of a program, and prices
    are what it adds to the whole at least: ops of these names may be paid for by other parts or not run, and what is beyond the ends may be in one
    kernel with what is here."""

    optimizer: str = "adamw"
    training: bool = True
    reduces_late: bool = False
    offload: bool = False
    wire: AxisLink | None = None
    in_flight: int = 1
    duty: Duty | None = None
    floor: frozenset[str] | None = None
    most: tuple[int, int] | None = None
    on_their_way: int = IN_FLIGHT

    @property
    def fullest(self) -> tuple[int, int]:
        """Micro-batches in flight when most are, and how many of them have run a part of their backward."""
        return self.most or self._own

    @property
    def _own(self) -> tuple[int, int]:
        return self.duty.fullest if self.duty is not None else (self.in_flight, 0)

    @property
    def counted(self) -> float:
        """How many times what the stage itself keeps `fullest` counts, at most."""
        (flying, late), (own, own_late) = self.fullest, self._own
        return max(1.0, flying / own, (flying - late) / max(1, own - own_late))


@dataclass(frozen=True, eq=False)
class OpCost:
    """Per strategy, seconds of a step: `compute` on local shapes, `inner` collectives of the implementation,
    `update` of the optimizer (parameters only)."""

    compute: np.ndarray
    inner: np.ndarray
    update: np.ndarray

    @property
    def total(self) -> np.ndarray:
        return self.compute + self.inner + self.update

    def times(self, runs: int) -> "OpCost":
        """Of an op that a step runs so often; the update is made once."""
        return self if runs == 1 else OpCost(runs * self.compute, runs * self.inner, self.update)


@dataclass(frozen=True, eq=False)
class CostTable:
    """All prices of one graph on one mesh and cluster. See `table`, `steps` and `ops`. `base`: while
    recomputation is undecided (recompute/undecided.py), the prices of the program without recomputation. `programs`: by the ops that
    are recomputed, those of programs made from this one; `replace` starts anew."""

    graph: Graph
    mesh: Mesh
    cluster: Cluster
    strategies: Strategies
    training: Training
    ops: Mapping[str, OpCost]
    redistribution: Redistribution
    seeds: Seeds = Seeds()
    base: "CostTable | None" = None
    _tables: dict = field(default_factory=dict)
    programs: "dict[frozenset[str], CostTable]" = field(default_factory=dict, init=False)

    def table(self, ref: Ref, src: SpecIndex, dst: SpecIndex) -> np.ndarray:
        """Seconds [source specs, target specs] of redistributing `ref`, inf where impossible. Equal questions get the
        same object."""
        key = (*self.kind(ref), src.specs, dst.specs)
        if key not in self._tables:
            seconds = present(src, dst, lambda a, b: self.ways(ref, a, b))
            self._tables[key] = np.where(changes(src, dst), np.inf, seconds) if ref in self._still else seconds
        return self._tables[key]

    def kind(self, ref: Ref) -> tuple[Hashable, ...]:
        """Equal for values whose changes of layout cost the same: shape, dtype, whether it may only lie as it is made, and whether its reductions
        share calls."""
        meta = self.graph.meta(ref)
        return meta.logical_shape, meta.dtype, ref in self._still, self.sharing(ref)

    def ways(self, ref: Ref, sources: Sequence[Spec], targets: Sequence[Spec]) -> np.ndarray:
        """Seconds [sources, targets] of redistributing `ref`, inf where there is no way; no matter whether it stays as it is made."""
        meta = self.graph.meta(ref)
        return self.redistribution.table(meta.logical_shape, meta.dtype, sources, targets, self.sharing(ref))

    def seconds(self, ref: Ref, src: Spec, dst: Spec) -> float:
        """One entry of `ways`, by its steps. Raises LoweringError where there is no way."""
        return sum(self.step_seconds(ref, step) for step in self.steps(self.graph.meta(ref), src, dst))

    def step_seconds(self, ref: Ref, step: Step) -> float:
        """Of one step of `ref`'s way."""
        others = self.sharing(ref)
        return step.seconds if others is None else self.redistribution.shared(step, others)

    def steps(self, meta: TensorMeta, src: Spec, dst: Spec) -> tuple[Step, ...]:
        """The redistribution that is priced, and that lowering executes."""
        return self.redistribution.steps(meta.logical_shape, meta.dtype, src, dst)

    @cached_property
    def trained(self) -> frozenset[str]:
        """Names of the parameter ops that have a gradient."""
        return trained_params(self.graph)

    @cached_property
    def _hideable(self) -> frozenset[Ref]:
        return flow.param_derived(self.graph) | self._leaving

    @cached_property
    def _leaving(self) -> frozenset[Ref]:
        """Gradients that are reduced while backward goes on."""
        return frozenset() if self.training.reduces_late else flow.gradient_bound(self.graph)

    @cached_property
    def _still(self) -> frozenset[Ref]:
        """Values that move on the other side of a cast alone: parameters behind the one that makes them narrow, gradients
        in the dtype that a precision policy wants them summed in. And what lies as its op alone knows."""
        early = {ref for ref, dtype in flow.reduction_dtypes(self.graph).items() if dtype != self.graph.meta(ref).dtype}
        return flow.narrowed(self.graph) | early | registry.private_values(self.graph)

    def sharing(self, ref: Ref) -> Together | None:
        """With whom the value's reduction shares a call, where it is a gradient on its way out, small if only in pieces; else None."""
        if ref not in self._leaving or value_bytes(self.graph.meta(ref), (R,) * self.mesh.ndim, self.mesh) > SMALL * self.mesh.size:
            return None
        return self._small

    @cached_property
    def _small(self) -> Together | None:
        """Of a part of a program, which is to cost no more than there, unknown: the other parts have some too."""
        return small_gradients(self.graph, self.training.on_their_way) if self.training.floor is None else UNKNOWN

    def hideable(self, ref: Ref) -> bool:
        """Whether redistributing this value can overlap compute (design: parameter gathers, gradient reductions)."""
        return ref in self._hideable


def present(src: SpecIndex, dst: SpecIndex, prices: Callable[[tuple[Spec, ...], tuple[Spec, ...]], np.ndarray]) -> np.ndarray:
    """`prices` of the specs in which there is a value, in a table of all: not to read costs nothing, to read what is nowhere
    cannot be."""
    here, there = ([i for i, s in enumerate(x.specs) if NOWHERE not in s] for x in (src, dst))
    if len(here) == len(src.specs) and len(there) == len(dst.specs):
        return prices(src.specs, dst.specs)
    out = np.full((len(src.specs), len(dst.specs)), np.inf)
    out[np.ix_(here, there)] = prices(tuple(src.specs[i] for i in here), tuple(dst.specs[i] for i in there))
    out[:, [i for i in range(len(dst.specs)) if i not in there]] = 0.0
    return out


def changes(src: SpecIndex, dst: SpecIndex) -> np.ndarray:
    """[source specs, target specs]: whether a value there is moves."""
    return np.array([[a != b and NOWHERE not in b for b in dst.specs] for a in src.specs], dtype=bool)


def trained_params(graph: Graph) -> frozenset[str]:
    return frozenset(op.name for op in graph.of_kind("param") if op.target in graph.outputs(Role.GRADIENT))


def build_cost_table(graph: Graph, mesh: Mesh, cluster: Cluster, strategies: Strategies,
                     training: Training) -> CostTable:
    """Price every strategy of every op; tables of redistributions are made on first use and shared. Where state may lie on the
    host, parameters get strategies for that (numbers without dims, whose state is as small as counters, do not)."""
    links = cluster.links_for(mesh)
    trained = trained_params(graph)
    if training.offload:
        strategies = with_host(strategies, [n for n in trained if graph.op(n).outputs[0].shape])
    kept = untouched(graph, cluster.device, open_ends=training.floor is not None)
    free = training.floor or frozenset()
    cache: dict[tuple[int, bool, Fused, int, bool, bool], OpCost] = {}
    ops: dict[str, OpCost] = {}
    for op in graph.ops:
        found = strategies[op.name]
        key = (id(found), op.name in trained, kept.get(op.name, NOTHING), graph.runs_of(op.phase), op.is_port, op.name in free)
        if key not in cache:
            zero = np.zeros(len(found))
            cache[key] = OpCost(zero, zero, zero) if op.name in free else _op_cost(
                op, found, mesh, cluster, links, training, *key[1:3]).times(key[3])
        ops[op.name] = cache[key]
    return CostTable(graph, mesh, cluster, strategies, training, ops, Redistribution(mesh, cluster))


def _op_cost(op: Op, found: StrategySet, mesh: Mesh, cluster: Cluster, links, training: Training, trained: bool,
             kept: Fused) -> OpCost:
    zero = np.zeros(len(found))
    if op.kind == "call":
        ins, outs = local_shapes(found, mesh)
        seconds = np.broadcast_to(np.asarray(compute.call_seconds(found.call, ins, outs, cluster.device, kept), float), zero.shape)
        load = load_of(found, mesh, cluster.device.imbalance)
        return OpCost(seconds * load, inner_seconds(found, ins, outs, mesh, links) * load, zero)
    if op.kind == "param" and trained:
        meta = op.outputs[0]
        local = np.array([prod(local_shape(meta.logical_shape, s, mesh.sizes)) * meta.dtype.itemsize
                          for s in found.output_specs[0].specs], dtype=float)[found.output_specs[0].index]
        update = np.asarray(compute.optimizer_seconds(training.optimizer, local, cluster.device))
        if found.on_host is not None:
            update = np.where(found.on_host, compute.host_seconds(training.optimizer, local, cluster.device), update)
        return OpCost(zero, zero, update)
    if op.is_port and training.wire is not None:
        return OpCost(zero, wire_seconds(found, mesh, training.wire), zero)
    return OpCost(zero, zero, zero)


def wire_seconds(found: StrategySet, mesh: Mesh, wire: AxisLink) -> np.ndarray:
    """Seconds that the local piece of a port takes on its way, per strategy."""
    (specs,), (meta,) = (found.output_specs, found.output_metas) if found.output_metas else (found.input_specs, found.input_metas)
    assert meta is not None, "a port has a value"
    nbytes = np.array([prod(local_shape(meta.logical_shape, s, mesh.sizes)) * meta.dtype.itemsize for s in specs.specs])[specs.index]
    return np.asarray(collectives.seconds("send_recv", nbytes, wire), float)


def local_shapes(found: StrategySet, mesh: Mesh) -> tuple[list, list]:
    """Local logical shapes of inputs and outputs, arrays [strategies] per dim (None for absent outputs)."""
    ins = [local_shape_array(m, found.inputs[:, i], mesh.sizes) for i, m in enumerate(found.input_metas)]
    outs = [None if m is None else local_shape_array(m, found.outputs[:, i], mesh.sizes)
            for i, m in enumerate(found.output_metas)]
    return ins, outs


def inner_seconds(found: StrategySet, ins: list, outs: list, mesh: Mesh, links) -> np.ndarray:
    """Seconds of the collectives inside the op, summed over mesh axes, per strategy."""
    total = np.zeros(len(found))
    if not any(row.inner for row in found.rows):
        return total
    for axis, size in enumerate(mesh.sizes):
        for r, row in enumerate(found.rows):
            hit = found.picked[:, axis] == r
            for inner in row.inner if size > 1 and hit.any() else ():
                nbytes = inner_bytes(inner, found, ins, outs)
                total[hit] += np.asarray(collectives.seconds(inner.kind, nbytes, links[axis]))[hit]
    return total


def load_of(found: StrategySet, mesh: Mesh, imbalance: float) -> float | np.ndarray:
    """Per strategy what the busiest rank takes, over what a rank takes in an even load."""
    uneven = np.array([row.uneven for row in found.rows])
    if imbalance == 1.0 or not uneven.any() or found.picked is None:
        return 1.0
    axes = [a for a, size in enumerate(mesh.sizes) if size > 1]
    return np.where(uneven[found.picked[:, axes]].any(axis=1), imbalance, 1.0)


def inner_bytes(inner: InnerCollective, found: StrategySet, ins: list, outs: list) -> np.ndarray:
    """Buffer bytes of an inner collective per strategy, from the local shapes."""
    side, index = (ins, found.input_metas) if inner.tensor.startswith("in") else (outs, found.output_metas)
    i = int(inner.tensor.lstrip("inout"))
    return np.broadcast_to(np.asarray(inner.numel(side[i]), float), (len(found),)) * (inner.dtype or index[i].dtype).itemsize

