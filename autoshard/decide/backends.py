"""What finds a plan: a search within memory by a backend of search/, or the seeds alone, spread over the program."""
from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from autoshard.base.plan import Plan
from autoshard.decide.attempts import Programs, searched
from autoshard.decide.fit import Asked
from autoshard.decide.options import PROPAGATE
from autoshard.decide.walks.propagate import Propagated, propagate, taken
from autoshard.errors import Interrupted
from autoshard.search.board import Progress
from autoshard.search.problem import Solution


@dataclass(frozen=True, eq=False)
class Found:
    """A solution with a choice, and the problem it solves. `spread`: what the choice is, where nothing was searched."""

    asked: Asked
    solution: Solution
    spread: Propagated | None = None

    def described(self, plan: Plan) -> Plan:
        """Its plan, with what there is to say about how it was found. Warnings are logged as well."""
        if self.spread is None:
            return plan
        for warning in self.spread.warnings:
            logging.getLogger("autoshard.propagate").warning(warning)
        return replace(plan, status=self.spread.status, notes=(*plan.notes, *self.spread.warnings))


def spread_seeds(asked: Asked, search: str) -> Propagated | None:
    """The seeds spread over the program, from then on one of the plans to start from; None where there are none. Raises UsageError
    where there are none and the backend `search` is to spread them."""
    seeds = asked.formulation.table.seeds
    if search != PROPAGATE and not seeds:
        return None
    spread = propagate(asked.formulation, seeds)
    asked.known.extend([spread.choice])
    return spread


def find(programs: Programs, spread: Propagated | None, progress: Progress) -> Found:
    """What the backend named in the options finds. Raises InfeasibleError, and Interrupted where there is no plan yet."""
    by_seeds = spread if programs.options.search == PROPAGATE else None
    if by_seeds is not None:
        asked, solution = programs.plain, taken(programs.plain.formulation, by_seeds)
    else:
        asked, solution = searched(programs, progress)
    if solution.choice is None and programs.clock.stopped:
        raise Interrupted("interrupted before a plan that fits was found; there is no plan yet")
    if solution.choice is None:
        raise programs.nothing_fits(solution, by_seeds and by_seeds.choice)
    return Found(asked, solution, by_seeds)
