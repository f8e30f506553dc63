"""Of floor rows (`floor_rows.py`): copies of parameters that lie there for other ops of the window, gathered ahead or read before.

A gather is issued `PREFETCH` gathers ahead of the first op that reads its result (`lower/schedule.py`), which lies there until the last one has. So
whether it does is a matter of several choices: whether the copy is made, who reads it, and whether other gathers come between. What holds in the plan
that was too full becomes a list of conditions, and a row counts the bytes less the bytes once for every condition that fails: exact near that
plan, and never more than what lies there.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.base.graph import Op
from autoshard.base.spec import NOWHERE, Spec
from autoshard.formulate.floor_weights import FloorWeights
from autoshard.formulate.memory_rows import Amounts
from autoshard.lower.schedule import PREFETCH
from autoshard.program.flow import param_derived
from autoshard.recompute.rewrite import is_source

MOST = 64
"""Gathers that may come between an op and one that is counted; with more of them a row says little."""
Condition = tuple[int, np.ndarray]
"""A node, and whether the condition holds for each of its strategies."""


@dataclass(frozen=True, eq=False, slots=True)
class Reader:
    """An op that may read the copy. `sure`: it runs in every plan; `reads`: the condition that it reads the copy."""

    order: int
    sure: bool
    reads: Condition


@dataclass(frozen=True, eq=False, slots=True)
class Gather:
    """A copy of a parameter in one window, whose `readers` there are in order. `moved`: whether its state makes it there, `made`: by sending
    something, else it is a view; `ready`: the order of the op behind which it may be issued."""

    node: int
    nbytes: float
    ready: int
    moved: np.ndarray
    made: np.ndarray
    readers: tuple[Reader, ...]

    def between(self, now: int, until: int) -> bool:
        """Whether its first reader may be an op behind `now` and not behind `until`."""
        return self.readers[0].order <= until and self.readers[-1].order > now


@dataclass(eq=False)
class FloorGathers(FloorWeights):
    """What of floor rows is a matter of gathers."""

    @cached_property
    def _gathers(self) -> Mapping[str, tuple[Gather, ...]]:
        """Per window, by the order of the last op that may read the copy."""
        found: dict[str, list[Gather]] = defaultdict(list)
        for node, copy in enumerate(self.formulation.copies, len(self.formulation.units.units)):
            if copy.value in param_derived(self.graph):
                for window in {self.graph.op(name).phase for name, _ in copy.readers}:
                    found[window].append(self._gather(node, window))
        return {window: tuple(sorted(gathers, key=lambda g: g.readers[-1].order)) for window, gathers in found.items()}

    def _gather(self, node: int, window: str) -> Gather:
        copy, graph = self.formulation.copies[node - len(self.formulation.units.units)], self.graph
        value, at = graph.op(copy.value.op), graph.window_index[window]
        moved = np.array([s.times[at] > 0 for s in copy.states])
        readers = [self._reader(name, i, copy.spec) for name, i in copy.readers if graph.op(name).phase == window]
        return Gather(node, self._local(copy.value, copy.spec), -1 if value.kind == "param" else graph.order[value.name], moved,
                      moved & np.array([bool(s.price) for s in copy.states]), tuple(sorted(readers, key=lambda r: r.order)))

    def _reader(self, name: str, i: int, spec: Spec) -> Reader:
        op, specs = self.graph.op(name), self.formulation.units.inputs(name, i)
        sure = op.kind == "call" and not is_source(op)
        return Reader(self.graph.order[name], sure, (self.formulation.units.index(name), np.array([s == spec for s in specs.specs])[specs.index]))

    @cached_property
    def _views(self) -> Mapping[str, tuple[Reader, ...]]:
        """Per window, readings of parameters in specs that every stored one brings for nothing: no copy has a node, and still it is issued ahead."""
        found: dict[str, list[Reader]] = defaultdict(list)
        for op in self.graph.of_kind("call"):
            for i, ref in enumerate(op.refs):
                if ref in param_derived(self.graph):
                    with_node = {c.spec for c in self.copies_of.get(ref, ())}
                    specs = self.formulation.units.inputs(op.name, i)
                    free = np.array([s not in with_node and NOWHERE not in s for s in specs.specs])[specs.index]
                    if free.any():
                        found[op.phase].append(Reader(self.graph.order[op.name], True, (self.formulation.units.index(op.name), free)))
        return {window: tuple(readers) for window, readers in found.items()}

    def _under_way(self, op: Op, now: int, plan: np.ndarray) -> Iterator[Amounts]:
        """Copies that `plan` makes in the window of the op, for others than the op."""
        far = False
        gathers = self._gathers.get(op.phase, ())
        for gather in gathers:
            if gather.readers[-1].order <= now or gather.ready >= now or not gather.made[plan[gather.node]]:
                continue
            if any(reader.order == now for reader in gather.readers):
                continue  # counted with the op
            last = next((r for r in reversed(gather.readers) if r.sure and r.order > now and holds_in(r.reads, plan)), None)
            if last is None:
                continue
            conditions = [(gather.node, gather.made), *([last.reads] if len(gather.readers) > 1 else [])]
            before = next((r for r in gather.readers if r.order < now and holds_in(r.reads, plan)), None)
            if before is not None:
                yield from while_all_hold([*conditions, before.reads], gather.nbytes)
            elif not far:
                others = self._between(op.phase, gather, now, last.order)
                far = len(others) > MOST or sum(not holds_in(other, plan) for other in others) >= PREFETCH
                if not far:
                    yield from while_all_hold([*conditions, *(other for other in others if holds_in(other, plan))], gather.nbytes)

    def _between(self, window: str, gather: Gather, now: int, until: int) -> list[Condition]:
        """The conditions that what else may be issued between `now` and the gather's reader is not."""
        others = [(g.node, ~g.moved) for g in self._gathers[window] if g is not gather and g.between(now, until)]
        return others + [(r.reads[0], ~r.reads[1]) for r in self._views.get(window, ()) if now < r.order <= until]


def holds_in(condition: Condition, plan: np.ndarray) -> bool:
    node, holds = condition
    return bool(holds[plan[node]])


def while_all_hold(conditions: Sequence[Condition], nbytes: float) -> Iterator[Amounts]:
    """Amounts of single nodes whose sum is `nbytes` where all conditions hold, and never more than 0 where one does not."""
    of_node: dict[int, np.ndarray] = {}
    for node, holds in conditions:
        of_node[node] = of_node[node] & holds if node in of_node else holds
    for i, (node, holds) in enumerate(of_node.items()):
        yield node, nbytes * (holds.astype(float) - (i > 0))
