"""The variants of a program that a search may take up: recomputation not at all, undecided, or of everything."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from autoshard.decide.how import How
from autoshard.decide.make_plan import Timelines
from autoshard.decide.memory.leanest import Lean, leanest
from autoshard.decide.program import Program, formulate_within, starting_plans
from autoshard.recompute.rewrite import candidates
from autoshard.recompute.undecided import open_table, program_with
from autoshard.space.cost_table import CostTable

LEANEST = 0.5  # share of the time left for the plan that needs least memory


@dataclass(frozen=True, eq=False)
class Variants:
    """The program without recomputation (`plain`) and its variants with recomputation, each built on first use. For inference
    all are `plain`. `how`: its clock is the limit of the whole search, including the time to explain why nothing fits."""

    plain: Program
    how: How

    @property
    def training(self) -> bool:
        return self.plain.formulation.table.graph.training

    @cached_property
    def open(self) -> Program:
        """The program in which recomputation is not decided yet. Every plan of the other programs is a plan of this one."""
        return self._of("open", open_table)

    @cached_property
    def lean(self) -> Program:
        """The program that recomputes every op that may be recomputed."""
        return self._of("lean", lambda table: program_with(table, frozenset(candidates(table.graph))))

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

    def _of(self, name: str, change: Callable[[CostTable], CostTable]) -> Program:
        if not self.training:
            return self.plain
        plain, made = self.plain, self.plain.learned.variants
        limit = plain.formulation.budget.limit
        if name not in made:
            formulation = formulate_within(change(plain.formulation.table), limit)
            made[name] = Program(formulation, Timelines(formulation, plain.settings), starting_plans(formulation), plain.settings)
        return made[name].within(limit)
