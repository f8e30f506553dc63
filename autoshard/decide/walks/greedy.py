"""Greedy starting plans. The search never returns a plan that is worse than a starting plan that fits.

Each walks the units in order and gives every unit the strategy that is cheapest where it stands (its own time plus
the redistribution of its inputs), from a classic storage of the parameters: whole (data parallel) or split
over as many mesh axes as they divide by (fully sharded). Nothing moves on the all-Replicate plan."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from autoshard.base.graph import Op, Ref
from autoshard.base.spec import R, Spec
from autoshard.formulate.copies import KEPT, OWN, CopyNode, State
from autoshard.formulate.problem_of import Formulation
from autoshard.program.flow import param_derived
from autoshard.space.decision_units import Unit
from autoshard.space.strategies import SpecIndex


def _data_parallel(spec: Spec) -> int:
    """Rank of a storage spec, lower is preferred: parameters whole everywhere."""
    return sum(p != R for p in spec)


def _fully_sharded(spec: Spec) -> int:
    """Parameters split over as many mesh axes as they divide by."""
    return sum(p == R for p in spec)


KNOWN: dict[str, Callable[[Spec], int]] = {"data parallel": _data_parallel, "fully sharded": _fully_sharded}


def known_plans(formulation: Formulation) -> Iterator[tuple[str, np.ndarray]]:
    """(name, choice) of every known plan, complete with copy states. Whether it fits in memory is the search's to see."""
    whole = [int(np.argmax(_shards(formulation, u) == 0)) for u in formulation.units.units]
    yield "replicated", complete(formulation, np.array(whole))
    for name, rank in KNOWN.items():
        yield name, complete(formulation, greedy(formulation, rank))


def _shards(formulation: Formulation, unit: Unit) -> np.ndarray:
    """Per strategy of a unit, how many placements are not Replicate."""
    sets = formulation.table.strategies
    return sum(np.sum(sets[m].inputs[p] != R, axis=(1, 2)) + np.sum(sets[m].outputs[p] != R, axis=(1, 2))
               for m, p in zip(unit.members, unit.picked, strict=True))


def greedy(formulation: Formulation, rank: Callable[[Spec], float], pick: Callable[[np.ndarray], Any] = np.argmin) -> np.ndarray:
    """Strategy per unit: parameters by least `rank` of their storage spec, every other unit what `pick` takes from the
    seconds of its strategies where it stands (the cheapest; inf cannot be reached)."""
    table, units, graph = formulation.table, formulation.units, formulation.table.graph
    picked = np.zeros(len(units.units), dtype=np.int64)

    def tensor(op: Op) -> SpecIndex:
        """Specs of a placeholder's or output's one tensor."""
        return units.inputs(op.name, 0) if op.kind == "output" else units.outputs(Ref(op.name))

    def cost(unit: Unit) -> np.ndarray:
        total = sum(table.ops[m].total[p] for m, p in zip(unit.members, unit.picked, strict=True))
        for member in unit.members:
            for i, ref in enumerate(graph.op(member).refs):
                if ref.op not in unit.members:
                    src, dst = units.outputs(ref), units.inputs(member, i)
                    seconds = graph.runs_of(graph.op(member).phase) * table.table(ref, src, dst)
                    total = total + seconds[src.index[picked[units.index(ref.op)]]][dst.index]
        return total

    def choose(unit: Unit) -> int:
        op = graph.op(unit.name)
        if op.kind == "param":
            return _argmin(units.outputs(Ref(op.name)), rank)
        if op.name in graph.chosen_ties:
            other = graph.op(graph.chosen_ties[op.name])
            specs = tensor(other)
            wanted = specs.specs[specs.index[picked[units.index(other.name)]]]
            return _argmin(tensor(op), lambda s: s != wanted)
        return int(pick(cost(unit)))

    for unit in sorted(units.units, key=lambda u: _turn(graph.op(u.name))):
        picked[units.index(unit.name)] = choose(unit)
    return picked


def _argmin(specs: SpecIndex, rank: Callable[[Spec], float]) -> int:
    return int(np.argmin(np.array([rank(s) for s in specs.specs])[specs.index]))


def _turn(op: Op) -> int:
    """Forward and user outputs first: a tangent's placement is its output's."""
    return 1 if op.kind == "tangent" else 2 if op.phase == "backward" else 0


def complete(formulation: Formulation, picked: np.ndarray, keep: bool = True) -> np.ndarray:
    """Add the state of every copy node that the chosen strategies ask for: the cheapest that serves its readers.
    Without `keep` a gathered parameter that both windows read is gathered in each (ZeRO-3)."""
    table, units = formulation.table, formulation.units
    derived = param_derived(table.graph)

    def spec_of(specs: SpecIndex, op: str) -> int:
        return int(specs.index[picked[units.index(op)]])

    def reads(copy: CopyNode, name: str, index: int) -> bool:
        specs = units.inputs(name, index)
        return specs.specs[spec_of(specs, name)] == copy.spec

    def state_of(copy: CopyNode) -> int:
        windows = {table.graph.window_of(name) for name, i in copy.readers if reads(copy, name, i)}
        if not windows:
            return 0
        specs = units.outputs(copy.value)
        source = spec_of(specs, copy.value.op)
        target = SpecIndex((copy.spec,), np.zeros(1, dtype=np.int64))
        price = float(table.table(copy.value, specs, target)[source, 0]) if specs.specs[source] != copy.spec else None
        fits = [i for i, s in enumerate(copy.states) if _serves(s, windows) and (s.name == OWN) == (price is None)
                and (s.price is None or s.price == price)]
        again = not keep and copy.value in derived
        return min(fits, key=lambda i: (again and copy.states[i].name == KEPT, copy.states[i].count(table.graph.runs),
                                        copy.states[i].name == KEPT), default=0)

    return np.concatenate([picked, np.array([state_of(c) for c in formulation.copies], dtype=np.int64)])


def _serves(state: State, windows: set[int]) -> bool:
    return all(state.serves[w] for w in windows)
