"""Greedy starting plans. The search never returns a plan that is worse than a starting plan that fits.

Each walks the units in order and gives every unit the strategy that is cheapest where it stands (its own time plus
the redistribution of its inputs), from a classic storage of the parameters: whole (data parallel) or split
over as many mesh axes as they divide by (fully sharded). Nothing moves on the all-Replicate plan."""
from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from autoshard.base.graph import LATE, Op, Ref
from autoshard.base.spec import R, Spec
from autoshard.decide.walks.reads import Wiring
from autoshard.decide.walks.walk import Placed, Score, Steps, ranked, walk
from autoshard.formulate.copies import KEPT, OWN, CopyNode, State
from autoshard.formulate.problem_of import Formulation
from autoshard.space.decision_units import DecisionUnit
from autoshard.space.strategies import SpecIndex


def _data_parallel(spec: Spec) -> int:
    """Rank of a storage spec, lower is preferred: parameters whole everywhere."""
    return sum(p != R for p in spec)


def _fully_sharded(spec: Spec) -> int:
    """Parameters split over as many mesh axes as they divide by."""
    return sum(p == R for p in spec)


STORAGE: dict[str, Callable[[Spec], int]] = {"data parallel": _data_parallel, "fully sharded": _fully_sharded}


def greedy_plans(formulation: Formulation) -> Iterator[tuple[str, np.ndarray]]:
    """(name, choice) of every greedy plan, complete with copy states. Whether it fits in memory is the search's to see."""
    wiring = Wiring(formulation)
    whole = [int(np.argmax(_shards(formulation, u) == 0)) for u in formulation.units.units]
    yield "replicated", complete(wiring, np.array(whole))
    for name, rank in STORAGE.items():
        yield name, complete(wiring, greedy(wiring, rank))


def _shards(formulation: Formulation, unit: DecisionUnit) -> np.ndarray:
    """Per strategy of a unit, how many placements are not Replicate."""
    sets = formulation.table.strategies
    return sum(np.sum(sets[m].inputs[p] != R, axis=(1, 2)) + np.sum(sets[m].outputs[p] != R, axis=(1, 2))
               for m, p in zip(unit.members, unit.picked, strict=True))


def greedy(wiring: Wiring, rank: Callable[[Spec], float],
           score: Callable[[np.ndarray], np.ndarray] = lambda seconds: seconds) -> np.ndarray:
    """Strategy per unit: parameters by least `rank` of their storage spec, every other unit by the least `score` of the
    seconds of its strategies where it stands (inf cannot be reached)."""
    units = wiring.formulation.units

    def way(placed: Placed) -> Steps:
        def stored(n: int) -> Score:
            return placed.untied(n), ranked(units.outputs(Ref(wiring.op(n).name)), rank)

        def cheapest(n: int) -> Score:
            return (score(placed.moved(n, wiring.compute(n))),)

        for n in sorted(range(len(units.units)), key=lambda n: _turn(wiring.op(n))):
            op = wiring.op(n)
            tied = n in wiring.ties and op.kind in ("output", "tangent")
            yield n, stored if op.kind == "param" else placed.tied if tied else cheapest

    return walk(wiring, way)


def _turn(op: Op) -> int:
    """Forward and user outputs first: a tangent's placement is its output's."""
    return 1 if op.kind == "tangent" else 2 if op.phase in LATE else 0


def complete(wiring: Wiring, picked: np.ndarray, keep: bool | Callable[[CopyNode], bool] = True) -> np.ndarray:
    """Add the state of every copy node that the chosen strategies ask for: the cheapest that serves its readers.
    Without `keep` a gathered parameter that both windows read is gathered in each (ZeRO-3). `keep` of a copy: whether that one is kept, whatever
    its value."""
    formulation, derived = wiring.formulation, wiring.param_derived
    table, units = formulation.table, formulation.units

    def state_of(copy: CopyNode, readers: tuple[tuple[int, int, np.ndarray], ...]) -> int:
        windows = {window for n, window, reads in readers if reads[picked[n]]}
        if not windows:
            return 0
        specs = units.outputs(copy.value)
        source = int(specs.index[picked[units.index(copy.value.op)]])
        target = SpecIndex((copy.spec,), np.zeros(1, dtype=np.int64))
        price = float(table.table(copy.value, specs, target)[source, 0]) if specs.specs[source] != copy.spec else None
        fits = [i for i, s in enumerate(copy.states) if _serves(s, windows) and (s.name == OWN) == (price is None)
                and (s.price is None or s.price == price)]
        again = not keep(copy) if callable(keep) else not keep and copy.value in derived
        return min(fits, key=lambda i: (again and copy.states[i].name == KEPT, copy.states[i].count(table.graph.runs),
                                        copy.states[i].name == KEPT), default=0)

    return np.concatenate([picked, np.array([*map(state_of, formulation.copies, wiring.copy_readers)], dtype=np.int64)])


def _serves(state: State, windows: set[int]) -> bool:
    return all(state.serves[w] for w in windows)
