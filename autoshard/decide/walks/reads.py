"""Edges between decision units: which unit reads which value. Walks over the units (baselines, propagation) use them."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.base.graph import Op, Ref, TensorMeta
from autoshard.base.spec import Spec
from autoshard.formulate.problem_of import Formulation
from autoshard.program import flow
from autoshard.space.decision_units import DecisionUnit
from autoshard.space.strategies import SpecIndex


@dataclass(frozen=True)
class Read:
    """Input `index` of `op`, a member of unit `reader`, is `value`, made by unit `maker`."""

    value: Ref
    maker: int
    reader: int
    op: str
    index: int


@dataclass(frozen=True, eq=False)
class Wiring:
    """The units of a formulation as a network. Units are numbered as in `formulation.units.units`."""

    formulation: Formulation

    @cached_property
    def reads(self) -> tuple[tuple[Read, ...], ...]:
        """Per unit, what it reads from other units, each (value, op, index) once."""
        units, graph = self.formulation.units, self.formulation.table.graph
        out = []
        for n, unit in enumerate(units.units):
            found = [Read(ref, units.index(ref.op), n, member, i)
                     for member in unit.members for i, ref in enumerate(graph.op(member).refs)]
            out.append(tuple(r for r in found if r.maker != n))
        return tuple(out)

    @cached_property
    def readers(self) -> tuple[tuple[Read, ...], ...]:
        """Per unit, the reads of its values by other units."""
        out: list[list[Read]] = [[] for _ in self.formulation.units.units]
        for reads in self.reads:
            for read in reads:
                out[read.maker].append(read)
        return tuple(map(tuple, out))

    @cached_property
    def ties(self) -> dict[int, int]:
        """Unit of a gradient output -> its parameter's (or input's) unit, of what is written back -> its buffer's, of a tangent -> its
        output's, and what seeds tie: they lie alike."""
        units, graph = self.formulation.units, self.formulation.table.graph
        tied = dict(graph.ties)
        tied |= {a: b for a, b in self.formulation.table.seeds.ties if a not in tied}
        return {units.index(a): units.index(b) for a, b in tied.items()}

    @cached_property
    def tied_to(self) -> Mapping[int, tuple[int, ...]]:
        """Per unit, what is tied to it in `ties`."""
        out: dict[int, tuple[int, ...]] = {}
        for n, other in self.ties.items():
            out[other] = (*out.get(other, ()), n)
        return out

    def held(self, n: int) -> SpecIndex:
        """Specs of the one tensor of a placeholder or output; of others of the first that they make."""
        units, op = self.formulation.units, self.op(n)
        return units.inputs(op.name, 0) if op.kind == "output" else units.outputs(Ref(op.name))

    def held_meta(self, n: int) -> TensorMeta:
        op, graph = self.op(n), self.formulation.table.graph
        return graph.meta(op.refs[0] if op.kind == "output" else Ref(op.name))

    @cached_property
    def copy_readers(self) -> tuple[tuple[tuple[int, int, np.ndarray], ...], ...]:
        """Per copy node, who may read it: a unit, the window it reads it in, and whether it does, per strategy of the unit."""
        units, graph, memo = self.formulation.units, self.formulation.table.graph, {}

        def reads(name: str, index: int, spec: Spec) -> np.ndarray:
            specs = units.inputs(name, index)
            if (id(specs), spec) not in memo:
                memo[id(specs), spec] = (specs.index == specs.specs.index(spec)) if spec in specs.specs else np.zeros(len(specs.index), bool)
            return memo[id(specs), spec]

        return tuple(tuple((units.index(name), graph.window_of(name), reads(name, i, copy.spec)) for name, i in copy.readers)
                     for copy in self.formulation.copies)

    @cached_property
    def param_derived(self) -> frozenset[Ref]:
        """Parameters, and what views and casts make of them alone."""
        return flow.param_derived(self.formulation.table.graph)

    def unit(self, n: int) -> DecisionUnit:
        return self.formulation.units.units[n]

    def op(self, n: int) -> Op:
        """The first member of a unit, which names it."""
        return self.formulation.table.graph.op(self.unit(n).name)

    def sources(self, read: Read) -> SpecIndex:
        """Specs the value has over its maker's strategies."""
        return self.formulation.units.outputs(read.value)

    def targets(self, read: Read) -> SpecIndex:
        """Specs the value is read in over its reader's strategies."""
        return self.formulation.units.inputs(read.op, read.index)

    def seconds(self, read: Read) -> np.ndarray:
        """[source specs, target specs] of redistributing the value, as often as a step does."""
        table = self.formulation.table
        once = table.table(read.value, self.sources(read), self.targets(read))
        runs = table.graph.runs_of(table.graph.op(read.op).phase)
        return once if runs == 1 else runs * once

    def possible(self, read: Read, source: Spec, target: Spec) -> bool:
        """Whether a value can be brought from one spec to the other."""
        seconds = self.seconds(read)[self.sources(read).specs.index(source), self.targets(read).specs.index(target)]
        return bool(np.isfinite(seconds))

    def compute(self, n: int) -> np.ndarray:
        """Seconds of a unit itself, per strategy."""
        unit, table = self.unit(n), self.formulation.table
        return sum(table.ops[m].total[p] for m, p in zip(unit.members, unit.picked, strict=True))

    def made(self, value: Ref, picked: np.ndarray) -> Spec:
        """The spec of a value under one strategy per unit."""
        specs = self.formulation.units.outputs(value)
        return specs.specs[specs.index[picked[self.formulation.units.index(value.op)]]]
