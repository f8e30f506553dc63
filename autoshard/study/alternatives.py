"""What the HTML report shows of the choices a plan did not make: one of each kind of edge and op that matters."""
from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

from autoshard.base.graph import Op, Ref
from autoshard.decide.make_plan import Chosen
from autoshard.seeds.names import is_main
from autoshard.study.explain import EdgeTable, OpTable, edge_table, op_table

Edge = tuple[Ref, str, int]
T = TypeVar("T")
MOST_EDGES, MOST_OPS, ROWS = 24, 12, 12


def alternatives(chosen: Chosen) -> tuple[EdgeTable | OpTable, ...]:
    """Prices of the edges whose layout the plan changes, the dearest first, then of the heaviest ops of the forward pass.
    Of equal ones in repeated layers the first stands for all."""
    edges = sorted(_first_of_each(_changed(chosen), lambda e: _edge_kind(chosen, e)), key=lambda e: -_seconds(chosen, e))
    ops = sorted(_first_of_each(_heavy(chosen), lambda op: _op_kind(chosen, op)), key=lambda op: -_own_seconds(chosen, op))
    return (*(edge_table(chosen.table, e, chosen, most=ROWS) for e in edges[:MOST_EDGES]),
            *(op_table(chosen, op.name, most=ROWS) for op in ops[:MOST_OPS]))


def _first_of_each(items: Iterable[T], kind: Callable[[T], Hashable]) -> list[T]:
    found: dict[Hashable, T] = {}
    for item in items:
        found.setdefault(kind(item), item)
    return list(found.values())


def _changed(chosen: Chosen) -> Iterator[Edge]:
    """The first reader of every copy that is made."""
    graph = chosen.table.graph
    for ref, _, copy in chosen.copies:
        readers = [(name, i) for name, i in graph.users.get(ref, ())
                   if graph.op(name).phase == copy.window and chosen.in_spec(name, i) == copy.spec]
        if copy.source == "made" and readers:
            yield (ref, *readers[0])


def _heavy(chosen: Chosen) -> Iterator[Op]:
    return (op for op in chosen.table.graph.of_kind("call")
            if op.phase == "forward" and is_main(op))


def _edge_kind(chosen: Chosen, edge: Edge) -> Hashable:
    ref, reader, i = edge
    graph = chosen.table.graph
    return _op_kind(chosen, graph.op(ref.op)), _op_kind(chosen, graph.op(reader)), i, chosen.in_spec(reader, i)


def _op_kind(chosen: Chosen, op: Op) -> Hashable:
    """Equal for ops that do the same in layers that differ by their numbers."""
    name = str(op.target) if op.kind in ("param", "buffer", "input") else f"{op.module}: {op.target}"
    specs = tuple(chosen.out_spec(Ref(op.name, i)) for i in range(len(op.outputs)))
    return re.sub(r"\b\d+\b", "*", name), op.phase, specs


def _seconds(chosen: Chosen, edge: Edge) -> float:
    ref, reader, i = edge
    return chosen.table.seconds(ref, chosen.out_spec(ref), chosen.in_spec(reader, i))


def _own_seconds(chosen: Chosen, op: Op) -> float:
    return float(chosen.table.ops[op.name].total[chosen.strategies[op.name]])
