"""Plans that experts write by hand (schemes.py), on the search's own tables: DDP, ZeRO, FSDP, Megatron, context and expert parallelism.

A baseline is one walk over the units in program order, each taking the strategy with the fewest departures from its roles, then the least
compute.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from autoshard.base.graph import LATE, Op, Ref
from autoshard.base.spec import R, Spec, is_partial
from autoshard.decide.walks.greedy import complete
from autoshard.decide.walks.reads import Read, Wiring
from autoshard.decide.walks.schemes import (
    READS_WHOLE,
    STORES_FREELY,
    Role,
    Scheme,
    attention_departures,
    behind_attention,
    is_attention,
    of_experts,
    schemes,
    sequence_departures,
    splits_input,
)
from autoshard.decide.walks.walk import Placed, Score, Steps, ranked, walk
from autoshard.formulate.problem_of import Formulation
from autoshard.program import flow
from autoshard.rules import registry
from autoshard.rules.family import Family
from autoshard.space.strategies import SpecIndex


def baselines(formulation: Formulation) -> Iterator[tuple[Scheme, np.ndarray]]:
    """(scheme, choice) of every baseline that this mesh and batch allow, each choice once (when gradients are reduced is none
    of the search's choices); memory is not looked at."""
    wiring = Wiring(formulation)
    mesh, graph = formulation.table.mesh, formulation.table.graph
    for scheme in schemes(mesh, graph):
        if not scheme.late and not scheme.obstacle(graph, mesh):
            yield scheme, baseline(wiring, scheme)


def baseline(wiring: Wiring, scheme: Scheme) -> np.ndarray:
    """The choice of `scheme` for every node of the formulation, copies included."""
    return complete(wiring, walk(wiring, lambda placed: _ByRoles(placed, scheme).steps()), keep=scheme.keep)


@dataclass(eq=False)
class _ByRoles:
    """The steps of one walk by the roles of a scheme, and their scores, which equal units share."""

    placed: Placed
    scheme: Scheme
    memo: dict[Any, Score] = field(default_factory=dict)

    @property
    def wiring(self) -> Wiring:
        return self.placed.wiring

    def steps(self) -> Steps:
        """Forward; the states, as forward reads them; the parameters likewise; casts of them, as they are stored; what depends on those;
        backward."""
        w, decided = self.wiring, self.placed.strategy
        order = range(len(w.formulation.units.units))
        of_param = [n for n in order if Ref(w.unit(n).name) in w.param_derived]
        states = [n for n in order if w.op(n).kind == "buffer" and len(w.unit(n)) > 1]
        chain = {*of_param, *states}
        rest = [n for n in order if n not in chain]
        yield from ((n, self.cheapest) for n in rest if w.op(n).phase == "forward" and w.op(n).kind != "output")
        yield from ((n, self.state) for n in states)
        yield from ((n, self.storage if w.op(n).kind == "param" else self.as_read) for n in reversed(of_param)
                    if w.op(n).kind == "param" or self.wishes(n))
        yield from ((n, self.as_others) for n in of_param if n not in decided)
        yield from ((n, self.as_stored) for n in of_param if registry.is_cast(w.op(n)))
        yield from ((n, self.cheapest) for n in rest if n not in decided and w.op(n).phase == "forward")
        yield from ((n, self.placed.tied if n in w.ties else self.cheapest) for n in rest if n not in decided)

    # -- ops ----------------------------------------------------------------------------------------

    def cheapest(self, n: int) -> Score:
        """The fewest departures from the roles, then least compute, then least communication."""
        w, reads = self.wiring, self.wiring.reads[n]
        sources = tuple(self.placed.source(r) for r in reads)
        unit = w.unit(n)
        key = (*map(id, unit.picked), *(id(w.formulation.table.ops[m]) for m in unit.members), sources,
               tuple((r.value in w.param_derived, r.value in self.experts, is_attention(w.op(r.maker)) and r.value.index) for r in reads),
               tuple(self._makes_experts(Ref(m)) for m in unit.members),
               tuple(self.placed.stored(self.leaves[r.value]) for r in reads if r.value in self.leaves))
        if key not in self.memo:
            departures = sum((ranked(w.targets(r), partial(self.departures, r, s)) for r, s in zip(reads, sources, strict=True)),
                             0.25 * self._split_by_itself(n) + self._beside_experts(n))
            seconds = self.placed.moved(n, np.zeros(len(unit)))
            self.memo[key] = np.where(np.isfinite(seconds), departures, np.inf), w.compute(n), seconds
        return self.memo[key]

    def _split_by_itself(self, n: int) -> np.ndarray:
        """Per strategy, the axes on which a unit of cheap ops splits what it makes and reads nothing split: an expand can. That computes
        less, but no scheme asks for it, and later the whole must be gathered. What is not decided yet follows, parameters aside."""
        w, unit = self.wiring, self.wiring.unit(n)
        read, made = np.zeros((2, len(unit), len(self.scheme.roles)), bool)
        ops = [w.formulation.table.graph.op(m) for m in unit.members]
        if not w.reads[n] or any((family := registry.family_of(op)) is None or not family.cheap for op in ops):
            return np.zeros(len(unit))
        for each in w.reads[n]:
            if each.maker in self.placed.strategy or each.value in w.param_derived:
                read |= _splits(w.targets(each))
        for value in (Ref(op.name, i) for op in ops for i, meta in enumerate(op.outputs) if meta is not None):
            made |= _splits(w.formulation.units.outputs(value))
        return np.sum(made & ~read, axis=1)

    def _beside_experts(self, n: int) -> np.ndarray:
        """Per strategy, departures of what a unit makes: experts' gradients are made where they are, and others sum over no experts (tokens go
        back first)."""
        w, axes = self.wiring, [a for a, role in enumerate(self.scheme.roles) if role == "experts"]
        total = np.zeros(len(w.unit(n)))
        ops = [w.formulation.table.graph.op(m) for m in w.unit(n).members if axes]
        for value in (Ref(op.name, i) for op in ops for i, meta in enumerate(op.outputs) if meta is not None):
            theirs = self._makes_experts(value)
            total = total + ranked(w.formulation.units.outputs(value), lambda s, theirs=theirs: sum(
                8.0 * (s[a] != 0) if theirs else 0.25 * is_partial(s[a]) for a in axes))
        return total

    def _makes_experts(self, value: Ref) -> bool:
        """Whether a value is the gradient of experts' weights."""
        return value in self.leaves and Ref(self.wiring.unit(self.leaves[value]).name) in self.experts

    def departures(self, read: Read, source: Spec | None, target: Spec) -> float:
        """How far reading a value in `target` departs from the roles, summed over mesh axes."""
        graph = self.wiring.formulation.table.graph
        maker, meta, reader = graph.op(read.value.op), graph.meta(read.value), graph.op(read.op)
        into_attention, from_attention, total = is_attention(reader), is_attention(maker), 0.0
        for axis, role in enumerate(self.scheme.roles):
            made, wanted = None if source is None else source[axis], target[axis]
            if read.value in self.wiring.param_derived:
                total += self._weight(role, reader, meta.ndim, made, wanted, read.value in self.experts)
            elif maker.kind == "input":
                total += wanted != splits_input(role, meta.shape, graph)
            elif into_attention and (far := attention_departures(role, graph.calls[reader.name], read.index, wanted)) is not None:
                total += far
            elif made is not None and from_attention and (
                    far := behind_attention(role, graph.calls[maker.name], read.value.index, made, wanted)) is not None:
                total += far
            else:
                total += _activation(role, meta.ndim, made, wanted) + (is_partial(wanted) and self._widens(reader)) * 1.5
                total += sequence_departures(role, meta, wanted, graph) if made != wanted else 0.0
                stored = self.placed.stored(self.leaves[read.value]) if read.value in self.leaves else None
                if stored is not None and not is_partial(wanted) and wanted != stored[axis]:
                    scatters = role == "sequence" and made is not None and is_partial(made)  # a gradient is no activation
                    total += 16.0 if reader.name in self.last else 1.5 if scatters else 0.5
        return total

    @cached_property
    def leaves(self) -> dict[Ref, int]:
        """Unit of the parameter whose gradient a value is, but for casts: it is summed right into the spec it leaves in."""
        w, graph = self.wiring, self.wiring.formulation.table.graph
        out = {graph.op(w.unit(n).name).refs[0]: param for n, param in w.ties.items() if w.op(n).kind == "output"}
        for op in reversed(graph.ops):
            if op.phase in LATE and registry.is_cast(op) and Ref(op.name) in out:
                out[op.refs[0]] = out[Ref(op.name)]
        return out

    @cached_property
    def experts(self) -> frozenset[Ref]:
        return of_experts(self.wiring.formulation.table.graph) if "experts" in self.scheme.roles else frozenset()

    @cached_property
    def last(self) -> frozenset[str]:
        """Casts behind which a gradient does not move any more."""
        return flow.casts_after_sums(self.wiring.formulation.table.graph)

    def _widens(self, op: Op) -> bool:
        """A cast to a wider dtype: a sum is cheaper before it."""
        graph = self.wiring.formulation.table.graph
        return registry.is_cast(op) and op.outputs[0].dtype.itemsize > graph.meta(op.refs[0]).dtype.itemsize

    @staticmethod
    def _weight(role: Role, reader: Op, ndim: int, made: int | None, wanted: int, expert: bool) -> float:
        if is_partial(wanted):  # nothing becomes Partial by redistribution
            return np.inf
        if role in READS_WHOLE:
            return 8.0 * (wanted != (0 if expert and role == "experts" else R))
        if made is not None:
            return 4.0 * (wanted != made)
        family = registry.family_of(reader)
        if family is None or not family.weighted or ndim < 2:
            return 0.0
        if family is Family.GATHER:  # a lookup splits its vocabulary
            return 4.0 if wanted == R else 0.5 * (wanted != 0)
        return 4.0 * (wanted == R)

    # -- parameters ---------------------------------------------------------------------------------

    def as_read(self, n: int) -> Score:
        """What views and casts make of a parameter, in the specs its readers want, each value in its own: a cast may be one unit
        with its transpose."""
        far = [ranked(self.wiring.formulation.units.outputs(value), partial(_distance, wanted)) for value, wanted in self.wishes(n)]
        zero = np.zeros(len(self.wiring.unit(n)))
        return sum(far, zero), far[0] if far else zero

    def as_others(self, n: int) -> Score:
        """A view that backward alone reads takes a parameter as forward does."""
        specs = [(read, self.wanted(read.maker)) for read in self.wiring.reads[n]]
        return tuple(ranked(self.wiring.targets(read), partial(_distance, wanted)) for read, wanted in specs)

    def as_stored(self, n: int) -> Score:
        """A cast in the spec its parameter is stored in, so that what is gathered is the narrow copy."""
        (read,) = self.wiring.reads[n]
        stored = self.placed.source(read)
        return (ranked(self.wiring.targets(read), lambda spec: spec != stored),)

    def wishes(self, n: int) -> list[tuple[Ref, Spec]]:
        """The values of a unit, and the specs its readers read them in, as far as those are decided."""
        specs = ((read.value, self.placed.target(read)) for read in self.wiring.readers[n])
        return [(value, spec) for value, spec in specs if spec is not None]

    def state(self, n: int) -> Score:
        """A state is stored as it is written and read."""
        return (ranked(self.wiring.formulation.units.outputs(Ref(self.wiring.unit(n).name)), partial(_distance, self.wanted(n))),)

    def wanted(self, n: int) -> Spec:
        """The spec most readers read a parameter or a state in; the first of them where several are as many."""
        count = Counter(spec for _, spec in self.wishes(n))
        return count.most_common(1)[0][0] if count else (R,) * len(self.scheme.roles)

    def storage(self, n: int) -> Score:
        """How a parameter is stored: on tensor axes as it is read, on data axes whole or split. Of several splits one that is
        gathered over data axes alone, the cheapest, then the lowest dim."""
        wanted, value, roles = self.wanted(n), Ref(self.wiring.unit(n).name), self.scheme.roles
        table, specs = self.wiring.formulation.table, self.wiring.formulation.units.outputs(value)
        ways = {s: table.steps(table.graph.meta(value), s, wanted) for s in specs.specs}
        free = [role in STORES_FREELY or role == "experts" and q == R for q, role in zip(wanted, roles, strict=True)]
        return (self.placed.untied(n),
                ranked(specs, lambda s: sum((self.scheme.sharded == (p == R)) if f else p != q for p, q, f in zip(s, wanted, free, strict=True))),
                ranked(specs, lambda s: sum(not free[a] for step in ways[s] for a in step.axes)),
                ranked(specs, lambda s: sum(step.seconds for step in ways[s])),
                ranked(specs, lambda s: sum(max(p, 0) for p in s)))


def _distance(wanted: Spec, spec: Spec) -> int:
    """On how many mesh axes two specs differ."""
    return sum(a != b for a, b in zip(spec, wanted, strict=True))


def _splits(specs: SpecIndex) -> np.ndarray:
    """[strategies, axes]: where a value is split."""
    return (np.array(specs.specs) >= 0)[specs.index]


def _activation(role: Role, ndim: int, made: int | None, wanted: int) -> float:
    """Departures of reading an activation made as `made` as `wanted` on an axis of this role."""
    if made == wanted or made is None:
        return 0.0
    if role in READS_WHOLE:
        return 2.0 if wanted == R and not is_partial(made) else 1.0
    if role == "sequence" and is_partial(made):
        along = wanted == 1 if ndim > 2 else wanted >= 0
        return 0.0 if along else 1.0 if wanted == R else 2.0
    return 1.0 if wanted == R else 2.0

