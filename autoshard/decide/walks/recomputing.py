"""Plans that recompute nothing, as choices of the program whose recomputation is not decided: all recomputed that may be, or nothing. The first
are starts where memory is tight; both tell what its rows are worth."""
from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial

import numpy as np

from autoshard.base.graph import LATE
from autoshard.base.plan import RECOMPUTE_SUFFIX
from autoshard.decide.walks.greedy import complete
from autoshard.decide.walks.reads import Wiring
from autoshard.formulate.copies import CopyNode
from autoshard.formulate.problem_of import Formulation
from autoshard.recompute.rewrite import is_source
from autoshard.recompute.undecided import source_runs
from autoshard.space.decision_units import DecisionUnit

MISSED, RUN = 1e3, 1e6  # of a row of a unit where nothing is recomputed: of a source that is read and off, and of one that runs; one that keeps has 1


class Recomputing:
    """Choices of `plain`, as choices of `undecided`, the program of `plain` whose recomputation is not decided. Ops have the same strategies.
    Whether a choice fits is the search's to see."""

    def __init__(self, plain: Formulation, undecided: Formulation) -> None:
        self.plain, self.undecided, self.wiring = plain, undecided, Wiring(undecided)
        self._penalties: dict[tuple, np.ndarray] = {}

    def everything(self, choice: np.ndarray, gathered: bool = False) -> np.ndarray:
        """All sources run that may; parameters are kept for backward, or `gathered` again."""
        return self._complete(choice, lambda unit: np.zeros(len(unit)), gathered)

    def nothing(self, choice: np.ndarray) -> np.ndarray:
        """Sources keep what backward reads, and nothing else."""
        return self._complete(choice, self._penalty, False)

    def _complete(self, choice: np.ndarray, penalty: Callable[[DecisionUnit], np.ndarray], gathered: bool) -> np.ndarray:
        strategies = self.plain.strategy_of(choice)

        def row(unit: DecisionUnit) -> int:
            """The best of those with the strategies of the op; of equal ones the first, where sources run (`open_units`)."""
            alike = np.all([p == strategies[m] for m, p in zip(unit.members, unit.picked, strict=True) if m in strategies], axis=0)
            return int(np.argmin(np.where(alike, penalty(unit), np.inf)))

        picked = np.array([row(unit) for unit in self.undecided.units.units], dtype=np.int64)
        return complete(self.wiring, picked, partial(self._kept, gathered))

    def _kept(self, gathered: bool, copy: CopyNode) -> bool:
        sources = self.undecided.table.graph.by_name
        return copy.value.op + RECOMPUTE_SUFFIX not in sources and not (gathered and copy.value in self.wiring.param_derived)

    def _penalty(self, unit: DecisionUnit) -> np.ndarray:
        """Per row of a unit, how far its sources are from keeping just what is read."""
        sources = [(m, picked) for m, picked in zip(unit.members, unit.picked, strict=True) if is_source(self.undecided.table.graph.op(m))]
        key = (len(unit), *((id(picked), m in self._read) for m, picked in sources))
        if key not in self._penalties:
            self._penalties[key] = sum((self._missed(m)[picked] for m, picked in sources), np.zeros(len(unit)))
        return self._penalties[key]

    def _missed(self, source: str) -> np.ndarray:
        """The same per strategy of one source. A view neither runs nor keeps: it is there, or off, which is the last strategy."""
        table = self.undecided.table
        off = np.arange(len(table.strategies[source])) == len(table.strategies[source]) - 1
        runs = source_runs(table, source) if table.graph.op(source).kept else np.zeros_like(off)
        return np.where(runs, RUN, np.where(off, MISSED * (source in self._read), 1.0 - (source in self._read)))

    @cached_property
    def _read(self) -> frozenset[str]:
        """Sources that backward reads, and those that views among them are views of."""
        graph = self.undecided.table.graph
        read = {r.op for op in graph.ops if op.phase in LATE and not is_source(op) for r in op.refs}
        for op in reversed(graph.ops):
            if op.name in read and is_source(op) and not op.kept:
                read |= {r.op for r in op.refs}
        return frozenset(read)
