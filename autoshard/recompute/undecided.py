"""Recomputation that is not decided yet, as strategies: prices and decision units of the program with recompute sources.

A recompute source (recompute/rewrite.py) *runs* (recomputes its values), *keeps* the values that forward made, or is *off* (nobody
reads it). A source that is off or keeps reads nothing and takes no time; one that keeps takes memory. A source belongs to the
decision unit of its op and has the same placements, so there is one choice per group of ops, and equal layers can be tied.
"""
from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from autoshard.base.graph import LATE, Op, Ref
from autoshard.base.plan import RECOMPUTE_SUFFIX
from autoshard.base.spec import NOWHERE
from autoshard.recompute.rewrite import candidates, is_source, is_view, with_recompute, with_sources
from autoshard.space.cost_table import CostTable, OpCost, build_cost_table
from autoshard.space.decision_units import DecisionUnit, DecisionUnits
from autoshard.space.strategies import StrategySet


def open_table(table: CostTable) -> CostTable:
    """The prices of the program while recomputation is undecided; `table` becomes its `base`. Strategies of a source: those of
    the op, if it may be recomputed; then one per layout in which its values may be kept; then off."""
    graph, again, made = with_sources(table.graph), frozenset(candidates(table.graph)), {}
    strategies, ops = dict(table.strategies), dict(table.ops)
    for op in graph.ops:
        if is_source(op):
            first = first_run(op.name)
            key = (id(table.strategies[first]), id(table.ops[first]), first in again, len(op.kept))
            if key not in made:
                made[key] = _choices(op, first in again, table.strategies[first], table.ops[first])
            strategies[op.name], ops[op.name] = made[key]
    return replace(table, graph=graph, strategies=strategies, ops=ops, base=table)


def first_run(source: str) -> str:
    """The name of the op that a source, or a recomputed op, belongs to."""
    return source.removesuffix(RECOMPUTE_SUFFIX)


def _choices(source: Op, may_run: bool, found: StrategySet, cost: OpCost) -> tuple[StrategySet, OpCost]:
    values, n_args = len(source.kept), len(source.refs) - len(source.kept)
    runs, axes = len(found) if may_run else 0, found.outputs.shape[2]
    keeps = kept_layouts(found) if values else found.outputs[:0]
    there = [i for i, meta in enumerate(found.output_metas) if meta is not None] if values else []

    def nowhere(n: int, tensors: int) -> np.ndarray:
        return np.full((n, tensors, axes), NOWHERE, dtype=np.int8)

    arguments = np.concatenate([found.inputs[:runs, :n_args], nowhere(len(keeps) + 1, n_args)])
    kept = np.concatenate([nowhere(runs, values), keeps[:, there], nowhere(1, values)])
    outputs = np.concatenate([found.outputs[:runs], keeps, nowhere(1, found.outputs.shape[1])])
    metas = (*found.input_metas[:n_args], *(found.output_metas[i] for i in there))
    free = np.zeros(len(keeps) + 1)
    return (StrategySet(np.concatenate([arguments, kept], axis=1), outputs, metas, found.output_metas),
            OpCost(*(np.concatenate([seconds[:runs], free]) for seconds in (cost.compute, cost.inner, cost.update))))


def kept_layouts(found: StrategySet) -> np.ndarray:
    """The distinct layouts [layouts, outputs, axes] in which an op may leave its values."""
    flat = found.outputs.reshape(len(found), -1)
    return np.unique(flat, axis=0).reshape(-1, *found.outputs.shape[1:])


# --- units ---

def open_units(units: DecisionUnits, table: CostTable) -> DecisionUnits:
    """`units` of the base program. Units of forward ops get the sources of their values: a recomputed op has the placements of the first."""
    joined = _Joined(table)
    return DecisionUnits(tuple(joined.of(unit) for unit in units.units), table)


@dataclass
class _Joined:
    """Builds units of ops and their sources. `wanted`: sources that an op of backward reads, other sources not counted."""

    table: CostTable
    memo: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = self.table.graph
        self.again = frozenset(candidates(self.table.base.graph))
        self.wanted = {r.op for op in graph.ops if op.phase in LATE and not is_source(op) for r in op.refs}

    def of(self, unit: DecisionUnit) -> DecisionUnit:
        """The unit with its sources; the same unit where backward reads none of its values."""
        graph, there = self.table.graph, [m for m in unit.members if m + RECOMPUTE_SUFFIX in self.table.graph.by_name]
        sources = [graph.op(m + RECOMPUTE_SUFFIX) for m in there]
        if not sources or graph.op(unit.name).phase != "forward":
            return unit
        kept = {s.name for s in sources if s.kept}
        modes = [frozenset(s.name for s in sources), self._needed(sources, self.wanted), self._needed(sources, self.wanted & kept)]
        key = (tuple(map(id, unit.picked)), tuple(map(there.count, unit.members)), *(id(self.table.strategies[s.name]) for s in sources),
               *(tuple(s.name in mode for s in sources) for mode in modes), self._wires(sources))
        if key not in self.memo:
            self.memo[key] = self._picked(unit, there, sources, modes)
        return DecisionUnit(unit.name, (*unit.members, *(s.name for s in sources)), self.memo[key])

    def _wires(self, sources: list[Op]) -> tuple:
        place = {s.name: i for i, s in enumerate(sources)}
        return tuple(tuple(place.get(r.op, -1) for r in s.refs) for s in sources)

    def _needed(self, sources: list[Op], wanted: set[str]) -> frozenset[str]:
        """The `wanted` sources, and the sources that views among them are views of."""
        needed: set[str] = set()
        for source in reversed(sources):
            if source.name in wanted or source.name in needed:
                needed.add(source.name)
                if not source.kept:
                    needed |= {r.op for r in source.refs}
        return frozenset(s.name for s in sources if s.name in needed)

    def _picked(self, unit: DecisionUnit, there: list[str], sources: list[Op], modes: list[frozenset[str]]) -> tuple[np.ndarray, ...]:
        """Strategies: all sources run; sources keep their values (all; those that are surely read; those without views, since
        backward may have kept copies of views); all sources off."""
        rows = [[self._runs(m, s, unit.of(m)) for m, s in zip(there, sources, strict=True)]]
        for mode in (*modes, frozenset()):
            rows.append([self._keeps(m, s, unit.of(m)) if s.name in mode else self._off(s, len(unit))
                         for m, s in zip(there, sources, strict=True)])
        joint = np.concatenate([np.stack((*unit.picked, *r), axis=1) for r in rows])
        _, first = np.unique(joint, axis=0, return_index=True)
        return tuple(joint[np.sort(first)].T.copy())

    def _runs(self, op: str, source: Op, picked: np.ndarray) -> np.ndarray:
        """A source that cannot run keeps its values while the others of its unit run."""
        return picked if op in self.again else self._keeps(op, source, picked)

    def _keeps(self, op: str, source: Op, picked: np.ndarray) -> np.ndarray:
        if not source.kept:
            return picked
        found = self.table.strategies[op]
        layouts = kept_layouts(found)
        place = {layout.tobytes(): i for i, layout in enumerate(layouts)}
        first = len(self.table.strategies[source.name]) - 1 - len(layouts)
        return np.array([first + place[found.outputs[p].tobytes()] for p in picked.tolist()], dtype=np.int64)

    def _off(self, source: Op, n: int) -> np.ndarray:
        return np.full(n, len(self.table.strategies[source.name]) - 1, dtype=np.int64)


# --- and back ---

def decided(table: CostTable, picked: dict[str, int]) -> tuple[CostTable, dict[str, int]]:
    """The program with the chosen recomputation, and its strategies, from a choice for every op of the undecided program."""
    base, graph = table.base, table.graph
    again = {first_run(s.name) for s in graph.ops if is_source(s) and source_runs(table, s.name)[picked[s.name]]}
    program = program_with(base, frozenset(again - _still_views(table, picked, again)))
    return program, {op.name: picked[op.name] for op in program.graph.ops}


def program_with(base: CostTable, again: frozenset[str]) -> CostTable:
    """The cost table of the program that recomputes the ops `again`. Cached, since plans are played and priced several times."""
    if again not in base.programs:
        graph = with_recompute(base.graph, again)
        strategies, ops = ({op.name: of[first_run(op.name)] for op in graph.ops} for of in (base.strategies, base.ops))
        if base.cluster.device.fuses:  # what a chain of ops saves depends on who reads it
            ops = build_cost_table(graph, base.mesh, base.cluster, strategies, base.training).ops
        base.programs[again] = replace(base, graph=graph, strategies=strategies, ops=ops)
    return base.programs[again]


def source_state(units: DecisionUnits, source: Ref) -> np.ndarray:
    """Per strategy of its unit: 0 where the source is off, 1 where it keeps forward's value, 2 where it recomputes the value. A view
    of a value kept in the same unit counts as kept."""
    op, unit = units.table.graph.op(source.op), units.index(source.op)
    there = ~np.all(units.table.strategies[op.name].outputs == NOWHERE, axis=(1, 2))[units.picked(op.name)]
    below = op
    while not below.kept and units.index(below.refs[0].op) == unit:
        below = units.table.graph.op(below.refs[0].op)
    return np.where(there, 1 + source_runs(units.table, below.name)[units.picked(below.name)], 0)


def source_runs(table: CostTable, source: str) -> np.ndarray:
    """Per strategy of a source, whether it runs: it makes its outputs and keeps nothing."""
    found, values = table.strategies[source], len(table.graph.op(source).kept)
    kept = found.inputs[:, found.inputs.shape[1] - values:]
    return np.all(kept == NOWHERE, axis=(1, 2)) & ~np.all(found.outputs == NOWHERE, axis=(1, 2))


def _still_views(table: CostTable, picked: dict[str, int], again: set[str]) -> set[str]:
    """Views of kept values, laid out as forward has them: backward reads those of forward."""
    still: set[str] = set()
    for source in (table.graph.op(name + RECOMPUTE_SUFFIX) for name in table.base.graph.by_name if name in again):
        name = first_run(source.name)
        if not is_view(table.base.graph.op(name)):
            continue
        (ref,), (below,) = source.refs, table.base.graph.op(name).refs
        held = table.strategies[ref.op].outputs[picked[ref.op], ref.index]
        unmoved = np.array_equal(held, table.strategies[source.name].inputs[picked[source.name], 0])
        if picked[source.name] == picked[name] and unmoved and (below.op not in again or below.op in still):
            still.add(name)
    return still
