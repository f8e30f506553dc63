"""The variants of a program that a search may take up: recomputation not at all, undecided, or of everything.

Gradients that wait for others to share a call, or are on their way, take memory: up to 64 MiB, and a bucket. Where that is much of the memory there
is, fewer bytes may wait in variants made for `little` memory, and their calls cost more, since fewer share one."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from autoshard.base.plan import GRADIENTS_IN_FLIGHT, IN_FLIGHT
from autoshard.decide.how import How
from autoshard.decide.make_plan import Timelines
from autoshard.decide.memory.leanest import Lean, leanest
from autoshard.decide.program import Program, formulate_within, starting_plans
from autoshard.decide.walks.recomputing import Recomputing
from autoshard.formulate.problem_of import Formulation
from autoshard.lower.schedule import reduces_late
from autoshard.recompute.rewrite import candidates
from autoshard.recompute.undecided import open_table, program_with
from autoshard.search.problem import distinct, row_loads
from autoshard.space.cost_table import CostTable

LEANEST = 0.5  # share of the time left for the plan that needs least memory
WAITING = 1 / 16  # of the memory that gradients on their way may take where it is little
LEAST = 16 << 10  # bytes
FEW = 4  # choices that the search with ample memory met last, which tell what rows are worth to the next
STEP = 4  # by which these bytes are less than `IN_FLIGHT`, once or several times: budgets near each other share a program


@dataclass(frozen=True, eq=False)
class Variants:
    """The program without recomputation (`plain`) and its variants with recomputation, each built on first use. For inference
    all are `plain`. `how`: its clock is the limit of the whole search, including the time to explain why nothing fits. `first`: the part of it
    for searches whose plans are refined op by op in the rest; None where none is."""

    plain: Program
    how: How
    first: How | None = None

    @property
    def training(self) -> bool:
        return self.plain.formulation.table.graph.training

    @cached_property
    def open(self) -> Program:
        """The program in which recomputation is not decided yet. Every plan of the other programs is a plan of this one, or costs more than one.
        The best plan with ample memory, with all recomputed, is a start: it costs less than greedy ones and often fits. What the rows are worth is
        guessed from choices that the search with ample memory has met, with nothing and with all recomputed, where these leave the
        windows of overlap free: else what a window is worth is not known by so few, and a guess far off costs more than it saves."""
        made, known = self._of("open", open_table), self.plain.learned
        if made is self.plain or not known.choices:
            return made
        change, learned = Recomputing(self.plain.formulation, made.formulation), made.learned
        learned.choices = distinct((*learned.choices, *(change.everything(known.choices[-1], gathered) for gathered in (False, True))))
        last = distinct((*known.near[-FEW:], known.choices[-1]))
        if not learned.near and all(_overlap_is_free(self.plain.formulation, choice) for choice in last):
            learned.near = tuple(into(choice) for choice in last for into in (change.nothing, change.everything))
        return made

    @cached_property
    def lean(self) -> Program:
        """The program that recomputes every op that may be recomputed, for as `little` memory as there is."""
        return self._of("lean", lambda table: program_with(table, frozenset(candidates(table.graph))), self.little or IN_FLIGHT)

    @cached_property
    def little(self) -> int | None:
        """Bytes of gradients that may be on their way at once where memory is little; None where that is as many as anywhere, and in a pipeline,
        whose stages have one setting."""
        formulation, bytes_ = self.plain.formulation, IN_FLIGHT
        while bytes_ > max(LEAST, WAITING * formulation.budget.limit):
            bytes_ //= STEP
        alone = self.training and formulation.table.training.wire is None and not self.plain.settings.get("pipeline")
        return bytes_ if alone and bytes_ < IN_FLIGHT and not reduces_late(self.plain.settings) else None

    @cached_property
    def light(self) -> Program:
        """`open` for `little` memory. What searches of `open` have met is near what is found here."""
        made = self._of("light", open_table, self.little or IN_FLIGHT)
        if not made.learned.near and shape(made) == shape(self.open):
            made.learned.near, made.learned.choices = self.open.learned.near, list(self.open.learned.choices)
        return made

    @cached_property
    def leanest(self) -> Lean | None:
        """The choice of `lean` with the least memory that a share of the time left finds."""
        return leanest(self.lean, How(self.how.clock.part(LEANEST)))

    @property
    def leanest_fits(self) -> bool:
        return self.leanest is not None and self.lean.formulation.budget.holds(self.leanest[1].peak)

    @property
    def with_leanest(self) -> Program:
        """`lean`, with `leanest` as its one starting plan."""
        return replace(self.lean, starts=() if self.leanest is None else (self.leanest[0],))

    def _settings(self, on_their_way: int) -> dict[str, Any]:
        return {**self.plain.settings, **({GRADIENTS_IN_FLIGHT: on_their_way} if on_their_way != IN_FLIGHT else {})}

    def _of(self, name: str, change: Callable[[CostTable], CostTable], on_their_way: int = IN_FLIGHT) -> Program:
        if not self.training:
            return self.plain
        plain, made, name = self.plain, self.plain.learned.variants, f"{name} {on_their_way}"
        limit, table = plain.formulation.budget.limit, plain.formulation.table
        if name not in made:
            there = replace(table, training=replace(table.training, on_their_way=on_their_way)) if on_their_way != IN_FLIGHT else table
            formulation, settings = formulate_within(change(there), limit), self._settings(on_their_way)
            made[name] = Program(formulation, Timelines(formulation, settings), starting_plans(formulation), settings)
        return made[name].within(limit)


def _overlap_is_free(formulation: Formulation, choice: np.ndarray) -> bool:
    """Whether all rows whose excess is paid for are within their limits."""
    problem = formulation.problem
    paid = np.isfinite(problem.row_price)
    return bool((row_loads(problem, choice)[paid] <= problem.row_limit[paid]).all())


def shape(program: Program) -> tuple[int, ...]:
    """Equal for programs whose choices say the same."""
    return tuple(map(len, program.formulation.problem.node_costs))
