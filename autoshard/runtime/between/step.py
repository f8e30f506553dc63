"""A variant between two others. What runs has new numbers; graph, plan and lowered program are made where somebody asks for them."""
from __future__ import annotations

import copy
from dataclasses import replace
from functools import cached_property
from typing import Any

from autoshard.base.graph import Graph
from autoshard.base.plan import Plan
from autoshard.decide.kept import KEPT
from autoshard.lower.lower import Lowered, lower
from autoshard.lower.schedule import schedule
from autoshard.runtime.between.code import Open
from autoshard.runtime.between.line import Line
from autoshard.runtime.params.stored import Stored
from autoshard.runtime.route import route_of
from autoshard.runtime.step import Backend, Step, locals_of

LATER = ("graph", "plan", "lowered", "deferred")
"""What a step has and this one makes when it is asked for."""


class Between(Step):
    """`ends`: the two variants, which differ in one size; `line`: at this one's; `programs`: their functions by attribute, with open numbers."""

    def __init__(self, ends: tuple[Step, Step], line: Line, programs: dict[str, Open]) -> None:
        """Raises NoLine where a number is none at this size."""
        a, b = self._ends = ends
        self._line = line
        vars(self).update({name: value for name, value in vars(b).items() if name not in LATER})
        self.calls, self._known = 0, {}
        for name, program in programs.items():
            issues = line(getattr(a, name).issues, getattr(b, name).issues)
            setattr(self, name, replace(getattr(b, name), call=program.at(line), issues=issues))
        self.user_metas = line(a.user_metas, b.user_metas)
        one, two = a.calling, b.calling
        self.calling = replace(two, inputs=line(one.inputs, two.inputs), out_leaves=line(one.out_leaves, two.out_leaves))

    @property
    def status(self) -> str:
        return KEPT

    @cached_property
    def graph(self) -> Graph:  # type: ignore[override]
        a, b = (end.graph for end in self._ends)
        return replace(b, ops=self._line(a.ops, b.ops))

    @cached_property
    def plan(self) -> Plan:  # type: ignore[override]
        """That of an end, with seconds on the line; its memory is that of the larger size."""
        a, b = (end.plan for end in self._ends)
        seconds = {name: self._line.fraction(s, b.predicted[name]) for name, s in a.predicted.items() if name in b.predicted}
        larger = max((a, b), key=lambda plan: plan.objective_s)
        note = f"seconds lie between those of sizes {self._line.first} and {self._line.second}, memory is that of the larger"
        return replace(larger, graph_hash=self.graph.hash, predicted=seconds, objective_s=seconds["step_s"], bound_s=0.0, gap=1.0, status=KEPT,
                       notes=(note,), worth=None, search={})

    @cached_property
    def lowered(self) -> Lowered:  # type: ignore[override]
        mesh = self.within.mesh
        return lower(self.graph, self.plan, mesh, schedule(self.graph, self.plan, mesh, route_of(self.plan)))

    def _made(self, stored: Stored, backend: Backend) -> Step:
        if backend is self.backend:
            twin = copy.copy(self)
            twin.calls, twin.stored, twin.local = 0, stored, locals_of(self.calling, self._ends[1].plan, self.place, stored)
            return twin
        return Step(self.graph, self.calling, self.plan, self.lowered, self.place, stored, backend, self.outputs, self.given)


def open_programs(a: Step, b: Step) -> dict[str, Any]:
    """The functions of two variants by attribute."""
    return {name: (getattr(a, name), getattr(b, name)) for name in ("forward", "backward") if getattr(b, name) is not None}
