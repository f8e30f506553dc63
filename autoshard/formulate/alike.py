"""Graphs that are alike: one program under several names, as stages of a pipeline are that have as many equal layers.

What is decided about one of them holds for the others, op by op in execution order. `likeness` says which are alike: it has all that strategies,
prices and the search problem of a graph depend on, with positions in place of names. `Like` gives what is known of one to another.
"""
from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from autoshard.base.graph import Graph, Op
from autoshard.base.plan import RECOMPUTE_SUFFIX
from autoshard.base.roles import Role
from autoshard.formulate.problem_of import Formulation
from autoshard.recompute.rewrite import with_recompute, with_sources
from autoshard.recompute.undecided import first_run
from autoshard.seeds.seeds import Seeds
from autoshard.space.cost_table import CostTable, Training
from autoshard.space.decision_units import DecisionUnits
from autoshard.space.layers import repeated_layers


def likeness(graph: Graph, seeds: Seeds) -> Hashable:
    """Equal for graphs that are alike and that seeds restrict alike."""
    place, layers = graph.order, repeated_layers(graph)
    stored = {str(op.target): place[op.name] for op in graph.of_kind("param", "buffer", "input")}
    numbers: dict[int, int] = {}  # classes of repeated layers, in the order in which they appear
    ops = tuple((op.kind, op.phase, tuple((place[r.op], r.index) for r in op.refs), graph.calls[op.name] if op.kind == "call" else _bare(op, stored),
                 numbers.setdefault(layers[op.name], len(numbers)) if op.name in layers else -1, seeds.specs.get(op.name)) for op in graph.ops)
    reads = frozenset((place[name], index, allowed) for (name, index), allowed in seeds.reads.items())
    ties = tuple((place[one], place[two]) for one, two in seeds.ties)
    return ops, reads, ties, tuple(seeds.matches.items()), graph.training, graph.microbatches, graph.idle, graph.notes


def _bare(op: Op, stored: Mapping[str, int]) -> Hashable:
    """An op that is no call. What the user passes and gets goes by its name, other outputs by the position of the tensor that they belong to."""
    if op.kind == "output":
        own = op.target.name if op.target.role is Role.USER else stored.get(str(op.target.name))
        return op.target.role, None if op.is_port else own, op.kwargs
    return None if op.is_port or op.kind in ("param", "buffer") else str(op.target), op.kwargs, op.outputs


@dataclass(frozen=True, eq=False)
class Like:
    """`graph` is like `other`: its names, and what is restricted and done in a step under them."""

    graph: Graph
    other: Graph
    seeds: Seeds
    training: Training

    @cached_property
    def names(self) -> dict[str, str]:
        """Of the ops of `graph`, by those of `other`."""
        return {op.name: own.name for own, op in zip(self.graph.ops, self.other.ops, strict=True)}

    def name(self, other: str) -> str:
        """Of an op, of one that runs again, or of a recompute source."""
        first = first_run(other)
        return self.names[other] if other in self.names else self.names[first] + RECOMPUTE_SUFFIX

    def prices(self, table: CostTable) -> CostTable:
        """Those of `table`, which has `other`, as it is or with recomputation, decided or not."""
        base = None if table.base is None else self.prices(table.base)
        again = {self.names[first_run(op.name)] for op in table.graph.ops if op.name not in self.names}
        graph = with_sources(self.graph) if base is not None else with_recompute(self.graph, again)
        strategies, ops = ({self.name(op): found for op, found in of.items()} for of in (table.strategies, table.ops))
        return replace(table, graph=graph, training=self.training, seeds=self.seeds, base=base, strategies=strategies, ops=ops)

    def problem(self, known: Formulation) -> Formulation:
        """`known`, which has prices of `other`, under these names: its numbers are the same."""
        table = self.prices(known.table)
        units = tuple(replace(u, name=self.name(u.name), members=tuple(map(self.name, u.members))) for u in known.units.units)
        copies = tuple(replace(c, value=replace(c.value, op=self.name(c.value.op)), readers=tuple((self.name(op), i) for op, i in c.readers))
                       for c in known.copies)
        rows = {moment if moment not in known.table.graph.by_name else self.name(moment): row for moment, row in known.memory_rows.items()}
        return replace(known, units=DecisionUnits(units, table), copies=copies, table=table, memory_rows=rows)
