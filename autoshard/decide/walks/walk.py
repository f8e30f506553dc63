"""One walk over the units of a program: greedy plans, baselines and propagation differ in its order and its scores alone.

A way to walk is a generator of steps `(unit, score)`. The score of a unit is a tuple of numbers per strategy, the most important
first; the least strategy is taken, and the generator goes on with that decided. A later step may decide a unit again."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from autoshard.base.graph import Ref
from autoshard.base.spec import Spec, beside, lie_alike
from autoshard.decide.walks.reads import Read, Wiring
from autoshard.space.strategies import SpecIndex

Score = tuple[np.ndarray, ...]
Steps = Iterator[tuple[int, Callable[[int], Score]]]


@dataclass(frozen=True, eq=False)
class Placed:
    """The units decided so far: `strategy[n]` of unit n of `wiring`."""

    wiring: Wiring
    strategy: dict[int, int] = field(default_factory=dict)

    def source(self, read: Read) -> Spec | None:
        """The spec a value has; None where its maker is not decided yet."""
        return self._spec(self.wiring.sources(read), read.maker)

    def target(self, read: Read) -> Spec | None:
        """The spec a value is read in; None where its reader is not decided yet."""
        return self._spec(self.wiring.targets(read), read.reader)

    def stored(self, n: int) -> Spec | None:
        """The spec of parameter unit `n`."""
        return self._spec(self._outputs(n), n)

    def moved(self, n: int, seconds: np.ndarray) -> np.ndarray:
        """`seconds` per strategy of unit n, and those of bringing there what it reads, as far as that is decided."""
        w = self.wiring
        for read in w.reads[n]:
            source = self.source(read)
            if source is not None:
                targets = w.targets(read)
                seconds = seconds + w.seconds(read)[w.sources(read).specs.index(source)][targets.index]
        return seconds

    def tied(self, n: int) -> Score:
        """A gradient in its parameter's spec, a tangent in its output's."""
        w, other = self.wiring, self.wiring.ties[n]
        mine, theirs = w.held(n), w.held(other)
        wanted = self._spec(theirs, other)
        return (ranked(mine, lambda spec: wanted is None or not lie_alike(w.held_meta(n), w.held_meta(other), spec, wanted)),)

    def untied(self, n: int) -> np.ndarray:
        """Per strategy of a parameter, whether its gradient cannot leave so: a view may give that dims which split otherwise."""
        w, mine = self.wiring, self._outputs(n)
        out, meta = np.zeros(len(mine.index), dtype=bool), w.held_meta(n)
        for m in w.tied_to.get(n, ()):
            other = w.held_meta(m)
            possible = {beside(other, meta, s) for s in w.held(m).specs} - {None}
            out |= ranked(mine, lambda spec, other=other, possible=possible: beside(meta, other, spec) not in possible).astype(bool)
        return out

    def _outputs(self, n: int) -> SpecIndex:
        return self.wiring.formulation.units.outputs(Ref(self.wiring.unit(n).name))

    def _spec(self, specs: SpecIndex, n: int) -> Spec | None:
        return specs.specs[specs.index[self.strategy[n]]] if n in self.strategy else None


def walk(wiring: Wiring, way: Callable[[Placed], Steps]) -> np.ndarray:
    """The strategy of every unit."""
    placed = Placed(wiring)
    for n, score in way(placed):
        placed.strategy[n] = least(score(n))
    return np.array([placed.strategy[n] for n in range(len(wiring.formulation.units.units))], dtype=np.int64)


def least(score: Score) -> int:
    """The strategy of the least score, the first of several."""
    return int(np.lexsort(score[::-1])[0])


def ranked(specs: SpecIndex, rank: Callable[[Spec], float]) -> np.ndarray:
    """The rank of the spec that each strategy has."""
    return np.array([rank(s) for s in specs.specs], dtype=float)[specs.index]
