"""A plan that recomputes nothing, changed to recompute all that may be: a start of the search where memory is tight."""
from __future__ import annotations

from functools import partial

import numpy as np

from autoshard.base.plan import RECOMPUTE_SUFFIX
from autoshard.decide.walks.greedy import complete
from autoshard.decide.walks.reads import Wiring
from autoshard.formulate.copies import CopyNode
from autoshard.formulate.problem_of import Formulation
from autoshard.space.decision_units import DecisionUnit


def recomputing(plain: Formulation, choice: np.ndarray, undecided: Formulation) -> list[np.ndarray]:
    """Choices of `undecided`, the program of `plain` whose recomputation is not decided, in which ops have the strategies of `choice`, a choice
    of `plain`, all sources that may run do, and parameters are kept for backward, or gathered again. Whether they fit is the search's to see."""
    strategies, wiring = plain.strategy_of(choice), Wiring(undecided)
    sources = undecided.table.graph.by_name

    def row(unit: DecisionUnit) -> int:
        """The first with the strategies of the op: there the sources run (`open_units`)."""
        return int(np.argmax(np.all([p == strategies[m] for m, p in zip(unit.members, unit.picked, strict=True) if m in strategies], axis=0)))

    def kept(keep: bool, copy: CopyNode) -> bool:
        return copy.value.op + RECOMPUTE_SUFFIX not in sources and (keep or copy.value not in wiring.param_derived)

    picked = np.array([row(unit) for unit in undecided.units.units], dtype=np.int64)
    return [complete(wiring, picked, partial(kept, keep)) for keep in (True, False)]
