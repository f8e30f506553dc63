"""What finds a plan: a search within memory by a backend of search/, or the seeds alone, spread over the program."""
from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autoshard.base.plan import OPTIMAL_REFINED, REFINED, Plan
from autoshard.base.worth import MemoryWorth
from autoshard.decide.how import How
from autoshard.decide.least_stored import with_least_stored
from autoshard.decide.make_plan import make_plan
from autoshard.decide.memory.attempts import search
from autoshard.decide.memory.leanest import Lean
from autoshard.decide.memory.why_nothing_fits import explain_infeasible
from autoshard.decide.notes.expert_notes import expert_notes
from autoshard.decide.notes.microbatch_notes import microbatch_notes
from autoshard.decide.notes.opaque_notes import whole_notes
from autoshard.decide.notes.output_notes import output_notes
from autoshard.decide.notes.padding_notes import padding_notes
from autoshard.decide.notes.seed_notes import seed_notes
from autoshard.decide.options import PROPAGATE
from autoshard.decide.program import Program
from autoshard.decide.refine import SHARE, may_refine, refine
from autoshard.decide.variants import Variants
from autoshard.decide.walks.propagate import NO_SEEDS, as_solution
from autoshard.errors import Interrupted, UsageError
from autoshard.search.problem import Solution, Status
from autoshard.space.cost_table import CostTable


@dataclass(frozen=True, eq=False)
class Found:
    """`solution` of `program`'s problem. `status` and `warnings` go into the plan. `ample`: a bound of every plan whatever the memory, 0
    where there is none. `only`: the one choice considered, where nothing was searched."""

    program: Program
    solution: Solution
    status: str
    warnings: tuple[str, ...] = ()
    ample: float = 0.0
    only: Lean | None = None

    def plan(self, table: CostTable, model: Mapping[str, Any], seeds: Mapping[str, str]) -> Plan:
        """The plan for `table`, the program without recomputation. `model`, `seeds`: what the plan says about them."""
        program = self.program
        plan = make_plan(program.formulation, self.solution, model=model, settings=program.settings, seeds=seeds, notes=seed_notes(table),
                         timelines=program.timelines)
        notes = (*plan.notes, *whole_notes(table.graph, plan), *microbatch_notes(table.graph, plan), *padding_notes(table.graph),
                 *expert_notes(table.graph, plan), *output_notes(table.graph, plan))
        plan = replace(plan, notes=notes, status=self.status).recomputing(table.graph.hash)
        return replace(plan, notes=(*plan.notes, *self.warnings), worth=MemoryWorth(min(self.ample, plan.objective_s)))


def find(program: Program, how: How) -> Found:
    """The cheapest plan of a program within its budget, by the backend of `how`. Raises InfeasibleError, UsageError, and
    Interrupted where there is no plan yet. A part of a model with a limit of its own is a program too:

        find(with_starts(formulate_within(table, limit), settings), How(Clock(seconds)))
    """
    finer = how.finer and how.backend not in BACKENDS
    variants = Variants(program, how, how.part(1.0 - SHARE) if finer and may_refine(program.formulation.table) else None)
    found = BACKENDS.get(how.backend, _searched)(variants)
    if found.solution.choice is None and how.clock.stopped:
        raise Interrupted("interrupted before a plan that fits was found; there is no plan yet")
    if found.solution.choice is None:
        raise explain_infeasible(variants.open, found.solution, found.only or variants.leanest, How(how.clock))
    return _refined(found, how) if finer else found


def _searched(variants: Variants) -> Found:
    outcome = search(variants)
    return Found(outcome.program, with_least_stored(outcome.program, outcome.solution), outcome.solution.status.value, ample=outcome.ample)


def _refined(found: Found, how: How) -> Found:
    program, solution = refine(found.program, found.solution, how)
    if program is found.program:
        return replace(found, solution=solution)
    status = OPTIMAL_REFINED if solution.status is Status.OPTIMAL else f"{solution.status.value}{REFINED}"
    return replace(found, program=program, solution=solution, status=status)


def _spread(variants: Variants) -> Found:
    """The plan that the seeds give, which is among the starting plans already."""
    program, spread = variants.plain, variants.plain.spread
    if spread is None:
        raise UsageError(NO_SEEDS)
    for warning in spread.warnings:
        logging.getLogger("autoshard.propagate").warning(warning)
    return Found(program, as_solution(spread), spread.status, spread.warnings, only=(spread.choice, program.timelines(spread.choice)))


BACKENDS: Mapping[str, Callable[[Variants], Found]] = {PROPAGATE: _spread}
"""Those that are none of `search.BACKENDS`."""
