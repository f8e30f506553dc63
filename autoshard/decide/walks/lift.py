"""A plan of a coarser mesh as a plan of a finer one, whose axes multiply to those of the first: dp=8,tp=8 on dp=8,a=2,b=4.

Every op does on all parts of an axis what it did on the axis. Two axes that split one dim nest in mesh order, as the ranks of the axis did, so each
rank holds the same piece; and layouts change over the parts taken as one, at the price of the axis. So a step costs no more than it
did, but for collectives inside of ops, which run axis by axis.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.base.mesh import Mesh
from autoshard.base.plan import Copy, OpPlan, Plan
from autoshard.base.spec import Spec
from autoshard.decide.walks.greedy import complete
from autoshard.decide.walks.reads import Wiring
from autoshard.formulate.problem_of import Formulation
from autoshard.space.cost_table import CostTable
from autoshard.space.decision_units import DecisionUnit


@dataclass(frozen=True)
class Layouts:
    """How the ops of a program are laid out on a mesh: what a plan says of that, by the same names, and nothing else."""

    ops: Mapping[str, OpPlan]
    graph_hash: str
    spec_mesh: Mesh
    copies: tuple[Copy, ...] = ()
    offload: tuple[str, ...] = ()


def parts_of(coarse: Mesh, fine: Mesh) -> tuple[int, ...] | None:
    """Of every axis of `fine` the axis of `coarse` that it is a part of; None where the ranks of one are not divided so."""
    out, left = [], list(coarse.sizes)
    at = 0
    for size in fine.sizes:
        while at < len(left) and left[at] == 1:
            at += 1
        if at == len(left) or left[at] % size:
            return None
        left[at] //= size
        out.append(at)
    return tuple(out) if all(n == 1 for n in left) else None


def lifts(formulation: Formulation, plans: Sequence[Plan | Layouts]) -> Iterator[np.ndarray]:
    """Those of `plans` that are plans of the same program on coarser meshes, as choices of `formulation`."""
    found = (lifted(formulation, plan) for plan in plans)
    return (choice for choice in found if choice is not None)


def lifted(formulation: Formulation, plan: Plan | Layouts) -> np.ndarray | None:
    """`plan` as a choice of `formulation`. What it recomputes is kept here. None where it is a plan of another program, where its mesh
    is no coarser one, and where an op or a decision unit has no such strategy: a plan that was refined op by op is none over units."""
    table = formulation.table
    parts = parts_of(plan.spec_mesh, table.mesh)
    if parts is None or plan.graph_hash != table.graph.hash:
        return None
    finder = _Finder(table, plan, parts)
    picked = [finder.strategy(unit) for unit in formulation.units.units]
    if any(s is None for s in picked):
        return None
    kept = {(copy.value, finder.spec(copy.spec)) for copy in plan.copies if copy.source == "kept"}
    return complete(Wiring(formulation), np.array(picked, dtype=np.int64), lambda copy: (str(copy.value), copy.spec) in kept)


class _Finder:
    """Looks up the strategies of a coarser plan; equal units once."""

    def __init__(self, table: CostTable, plan: Plan | Layouts, parts: tuple[int, ...]) -> None:
        self.table, self.plan, self.parts = table, plan, parts
        self.away = frozenset(plan.offload)
        self._known: dict[Any, int | None] = {}

    def spec(self, spec: Spec) -> Spec:
        return tuple(spec[axis] for axis in self.parts)

    def strategy(self, unit: DecisionUnit) -> int | None:
        """The cheapest strategy of a unit in which all members have theirs."""
        table, ops = self.table, self.plan.ops
        away = any(table.graph.op(m).target in self.away for m in unit.members) if self.away else False
        key = (*((id(table.strategies[m]), id(table.ops[m]), id(p), ops[m]) for m, p in zip(unit.members, unit.picked, strict=True)), away)
        if key not in self._known:
            self._known[key] = self._search(unit)
        return self._known[key]

    def _search(self, unit: DecisionUnit) -> int | None:
        alike = np.all([self._has(m, p) for m, p in zip(unit.members, unit.picked, strict=True)], axis=0)
        if not alike.any():
            return None
        costs = sum(self.table.ops[m].total[p] for m, p in zip(unit.members, unit.picked, strict=True))
        return int(np.argmin(np.where(alike, costs, np.inf)))

    def _has(self, name: str, picked: np.ndarray) -> np.ndarray:
        """Per strategy of the unit, whether the op has the placements of the plan."""
        found, wanted = self.table.strategies[name], self.plan.ops[name]
        alike = self._equal(found.inputs[picked], wanted.inputs) & self._equal(found.outputs[picked], wanted.outputs)
        if found.on_host is not None:
            alike &= found.on_host[picked] == (self.table.graph.op(name).target in self.away)
        return alike

    def _equal(self, placements: np.ndarray, specs: Sequence[Spec]) -> np.ndarray:
        there = np.array([self.spec(s) for s in specs], dtype=np.int64).reshape(1, len(specs), len(self.parts))
        return np.all(placements == there, axis=(1, 2))
