"""Plans that experts write by hand, on the search's own tables: DDP, ZeRO, FSDP, Megatron and their products.

A scheme gives every mesh axis a role and says how parameters are stored:

    data       the batch is split; whoever computes with a parameter reads it whole
    tensor     matmuls split their weight: along the contracted dim where their input is split there already (row),
               else along the other (column); sums are reduced to whole values at once
    sequence   as tensor, but sums are reduce-scattered along the sequence, and gathered where a column starts

    whole      parameters, gradients and optimizer state on every rank of the data axes
    sharded    split over the data axes; a gathered copy is kept from forward to backward (`keep`: ZeRO-1 and 2) or gathered again
               in backward (ZeRO-3). Gradients are reduced where they are made, or all when backward is through (`late`:
               ZeRO-1), which takes the memory of whole gradients and hides behind no compute.

The roles are as in Rajbhandari et al., "ZeRO" (2020), Shoeybi et al., "Megatron-LM" (2019) and Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (2022). A baseline is one walk over the units in
program order, each taking the strategy with the fewest departures from its roles, then the least compute.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from autoshard.base.graph import Op, Ref
from autoshard.base.mesh import Mesh
from autoshard.base.spec import R, Spec, is_partial
from autoshard.decide.walks.greedy import complete
from autoshard.decide.walks.reads import Read, Wiring
from autoshard.formulate.problem_of import Formulation
from autoshard.program import flow
from autoshard.rules import registry
from autoshard.rules.family import Family

Role = Literal["data", "tensor", "sequence"]


@dataclass(frozen=True)
class Scheme:
    """One way to plan by hand: a role per mesh axis, how parameters are stored, whether gathered copies are kept and
    gradients reduced late."""

    name: str
    roles: tuple[Role, ...]
    sharded: bool = False
    keep: bool = True
    late: bool = False

    def describe(self, mesh: Mesh) -> str:
        """`"data dp, tensor tp"`."""
        words = {r: "*".join(n for n, role in zip(mesh.names, self.roles, strict=True) if role == r) for r in self.roles}
        return ", ".join(f"{role} {names}" for role, names in words.items())

    def obstacle(self, formulation: Formulation) -> str:
        """Why the scheme cannot be had as it is meant, or ""."""
        table = formulation.table
        ranks = int(np.prod([s for s, r in zip(table.mesh.sizes, self.roles, strict=True) if r == "data"], initial=1))
        batch = batch_size(table.graph.of_kind("input"))
        if ranks > 1 and (not batch or batch % ranks):
            return f"a batch of {batch} does not split over {ranks} ranks"
        return ""


def schemes(mesh: Mesh) -> tuple[Scheme, ...]:
    """The baselines of a mesh. Data parallel schemes use all axes; tensor parallel ones the last axis (the fastest
    links), with data parallelism on the others."""
    data: tuple[Role, ...] = ("data",) * mesh.ndim
    tensor: tuple[Role, ...] = (*data[1:], "tensor")
    sequence: tuple[Role, ...] = (*data[1:], "sequence")
    found = [Scheme("DDP", data), Scheme("ZeRO-1", data, sharded=True, late=True), Scheme("ZeRO-2", data, sharded=True),
             Scheme("FSDP (ZeRO-3)", data, sharded=True, keep=False), Scheme("Megatron TP", tensor), Scheme("TP + sequence parallel", sequence)]
    if mesh.ndim > 1:
        found += [Scheme("FSDP x TP", tensor, sharded=True, keep=False),
                  Scheme("FSDP x (TP + sequence)", sequence, sharded=True, keep=False)]
    return tuple(found)


def batch_size(inputs: tuple[Op, ...]) -> int:
    """Dim 0 of the first input that has dims."""
    return next((op.outputs[0].logical_shape[0] for op in inputs if op.outputs[0].logical_shape), 0)


def baselines(formulation: Formulation) -> Iterator[tuple[Scheme, np.ndarray]]:
    """(scheme, choice) of every baseline that this mesh and batch allow, each choice once (when gradients are reduced is none
    of the search's choices); memory is not looked at."""
    wiring = Wiring(formulation)
    for scheme in schemes(formulation.table.mesh):
        if not scheme.late and not scheme.obstacle(formulation):
            yield scheme, baseline(wiring, scheme)


def baseline(wiring: Wiring, scheme: Scheme) -> np.ndarray:
    """The choice of `scheme` for every node of the formulation, copies included."""
    return complete(wiring.formulation, _Walk(wiring, scheme).picked(), keep=scheme.keep)


@dataclass(eq=False)
class _Walk:
    """State of one walk: `strategy` of the units decided so far. Decisions are shared between equal units."""

    wiring: Wiring
    scheme: Scheme
    strategy: dict[int, int] = field(default_factory=dict)
    memo: dict = field(default_factory=dict)

    def picked(self) -> np.ndarray:
        w = self.wiring
        order = range(len(w.formulation.units.units))
        of_param = [n for n in order if Ref(w.unit(n).name) in w.param_derived]
        chain = set(of_param)
        rest = [n for n in order if n not in chain]
        for n in (n for n in rest if w.op(n).phase == "forward" and w.op(n).kind != "output"):
            self.strategy[n] = self.cheapest(n)
        for n in reversed(of_param):
            self.strategy[n] = self.storage(n) if w.op(n).kind == "param" else self.as_read(n)
        for n in of_param:
            if registry.is_cast(w.op(n)):
                self.strategy[n] = self.as_read(n, cast=True)
        for n in (n for n in rest if n not in self.strategy and w.op(n).phase == "forward"):
            self.strategy[n] = self.cheapest(n)
        for n in (n for n in rest if n not in self.strategy):
            self.strategy[n] = self.tied(n) if n in w.ties else self.cheapest(n)
        return np.array([self.strategy[n] for n in order], dtype=np.int64)

    # -- ops ----------------------------------------------------------------------------------------

    def cheapest(self, n: int) -> int:
        """The strategy with the fewest departures from the roles, then least compute, then least communication."""
        w, reads = self.wiring, self.wiring.reads[n]
        sources = tuple(self.source(r) for r in reads)
        unit = w.unit(n)
        key = (*map(id, unit.picked), *(id(w.formulation.table.ops[m]) for m in unit.members), sources,
               tuple(r.value in w.param_derived for r in reads), tuple(self.stored(self.leaves[r.value]) for r in reads if r.value in self.leaves))
        if key not in self.memo:
            departures = np.zeros(len(unit))
            seconds = np.zeros(len(unit))
            for read, source in zip(reads, sources, strict=True):
                targets = w.targets(read)
                departures += np.array([self.departures(read, source, t) for t in targets.specs])[targets.index]
                if source is not None:
                    row = w.sources(read).specs.index(source)
                    seconds += w.seconds(read)[row][targets.index]
            possible = np.where(np.isfinite(seconds), departures, np.inf)
            self.memo[key] = int(np.lexsort((seconds, w.compute(n), possible))[0])
        return self.memo[key]

    def source(self, read: Read) -> Spec | None:
        """The spec a value has; None where its maker is not decided yet."""
        if read.maker not in self.strategy:
            return None
        specs = self.wiring.sources(read)
        return specs.specs[specs.index[self.strategy[read.maker]]]

    def departures(self, read: Read, source: Spec | None, target: Spec) -> float:
        """How far reading a value in `target` departs from the roles, summed over mesh axes."""
        graph = self.wiring.formulation.table.graph
        maker, meta, reader = graph.op(read.value.op), graph.meta(read.value), graph.op(read.op)
        total = 0.0
        for axis, role in enumerate(self.scheme.roles):
            made, wanted = None if source is None else source[axis], target[axis]
            if read.value in self.wiring.param_derived:
                total += self._weight(role, reader, meta.ndim, made, wanted)
            elif maker.kind == "input":
                splits = role == "data" and meta.ndim > 0 and meta.logical_shape[0] == batch_size(graph.of_kind("input"))
                total += wanted != (0 if splits else R)
            else:
                total += _activation(role, meta.ndim, made, wanted) + (is_partial(wanted) and self._widens(reader)) * 1.5
                leaves = self.leaves.get(read.value)
                if leaves is not None and not is_partial(wanted) and wanted != self.stored(leaves)[axis]:
                    scatters = role == "sequence" and made is not None and is_partial(made)  # a gradient is no activation
                    total += 16.0 if reader.name in self.last else 1.5 if scatters else 0.5
        return total

    @cached_property
    def leaves(self) -> dict[Ref, int]:
        """Unit of the parameter whose gradient a value is, but for casts: it is summed right into the spec it leaves in."""
        w, graph = self.wiring, self.wiring.formulation.table.graph
        out = {graph.op(w.unit(n).name).refs[0]: param for n, param in w.ties.items() if w.op(n).kind == "output"}
        for op in reversed(graph.ops):
            if op.phase == "backward" and registry.is_cast(op) and Ref(op.name) in out:
                out[op.refs[0]] = out[Ref(op.name)]
        return out

    @cached_property
    def last(self) -> frozenset[str]:
        """Casts behind which a gradient does not move any more."""
        return flow.casts_after_sums(self.wiring.formulation.table.graph)

    def stored(self, n: int) -> Spec:
        """The spec that parameter unit `n` is stored in."""
        specs = self.wiring.formulation.units.outputs(Ref(self.wiring.unit(n).name))
        return specs.specs[specs.index[self.strategy[n]]]

    def _widens(self, op: Op) -> bool:
        """A cast to a wider dtype: a sum is cheaper before it."""
        graph = self.wiring.formulation.table.graph
        return registry.is_cast(op) and op.outputs[0].dtype.itemsize > graph.meta(op.refs[0]).dtype.itemsize

    @staticmethod
    def _weight(role: Role, reader: Op, ndim: int, made: int | None, wanted: int) -> float:
        if is_partial(wanted):  # nothing becomes Partial by redistribution
            return np.inf
        if role == "data":
            return 8.0 * (wanted != R)
        if made is not None:
            return 4.0 * (wanted != made)
        family = registry.family_of(reader)
        if family is None or not family.weighted or ndim < 2:
            return 0.0
        if family is Family.GATHER:  # a lookup splits its vocabulary
            return 4.0 if wanted == R else 0.5 * (wanted != 0)
        return 4.0 * (wanted == R)

    # -- parameters ---------------------------------------------------------------------------------

    def as_read(self, n: int, cast: bool = False) -> int:
        """What views and casts make of a parameter, in the specs its readers want, each value in its own: a cast may be one unit
        with its transpose. A cast (`cast`) in the spec its parameter is stored in, so that what is gathered is the narrow copy."""
        w = self.wiring
        if cast:
            (read,) = w.reads[n]
            stored, targets = self.source(read), w.targets(read)
            return int(np.argmin(np.array([t != stored for t in targets.specs])[targets.index]))
        off, first = np.zeros(len(w.unit(n))), np.zeros(len(w.unit(n)))
        for i, (value, wanted) in enumerate(self.wishes(n)):
            specs = w.formulation.units.outputs(value)
            far = np.array([sum(a != b for a, b in zip(s, wanted, strict=True)) for s in specs.specs], dtype=float)[specs.index]
            off += far
            first = far if i == 0 else first
        return int(np.lexsort((first, off))[0])

    def wishes(self, n: int) -> list[tuple[Ref, Spec]]:
        """The values of a unit, and the specs its readers read them in, as far as those are decided."""
        w = self.wiring
        reads = [read for read in w.readers[n] if read.reader in self.strategy]
        specs = ((read.value, w.targets(read)) for read in reads)
        return [(value, t.specs[t.index[self.strategy[read.reader]]]) for read, (value, t) in zip(reads, specs, strict=True)]

    def wanted(self, n: int) -> Spec:
        """The spec most readers read a parameter in; the first of them where several are as many."""
        count: dict[Spec, int] = {}
        for _, spec in self.wishes(n):
            count[spec] = count.get(spec, 0) + 1
        whole = (R,) * len(self.scheme.roles)
        return max(count, key=lambda s: count[s]) if count else whole

    def storage(self, n: int) -> int:
        """How a parameter is stored: on tensor axes as it is read, on data axes whole or split. Of several splits one that is
        gathered over data axes alone, the cheapest, then the lowest dim."""
        w, wanted, value = self.wiring, self.wanted(n), Ref(self.wiring.unit(n).name)
        table, specs = w.formulation.table, w.formulation.units.outputs(value)
        meta = table.graph.meta(value)
        ways = {s: table.redistribution.steps(meta.logical_shape, meta.dtype, s, wanted) for s in specs.specs}
        split = self.scheme.sharded

        def rank(spec: Spec) -> tuple[float, ...]:
            off = sum(p != q if role != "data" else split == (p == R)
                      for p, q, role in zip(spec, wanted, self.scheme.roles, strict=True))
            astray = sum(self.scheme.roles[a] != "data" for step in ways[spec] for a in step.axes)
            return off, astray, sum(step.seconds for step in ways[spec]), sum(max(p, 0) for p in spec)

        best = min(specs.specs, key=rank)
        return int(np.argmax(specs.index == specs.specs.index(best)))

    def tied(self, n: int) -> int:
        """A gradient in its parameter's spec, a tangent in its output's."""
        w, other, units = self.wiring, self.wiring.ties[n], self.wiring.formulation.units
        if w.op(n).kind == "tangent":
            specs, theirs = units.outputs(Ref(w.unit(n).name)), units.inputs(w.unit(other).name, 0)
        else:
            specs, theirs = units.inputs(w.unit(n).name, 0), units.outputs(Ref(w.unit(other).name))
        wanted = theirs.specs[theirs.index[self.strategy[other]]]
        return int(np.argmax(specs.index == specs.specs.index(wanted)))


def _activation(role: Role, ndim: int, made: int | None, wanted: int) -> float:
    """Departures of reading an activation made as `made` as `wanted` on an axis of this role."""
    if made == wanted or made is None:
        return 0.0
    if role == "data":
        return 2.0 if wanted == R and not is_partial(made) else 1.0
    if role == "sequence" and is_partial(made):
        along = wanted == 1 if ndim > 2 else wanted >= 0
        return 0.0 if along else 1.0 if wanted == R else 2.0
    return 1.0 if wanted == R else 2.0

