"""Seeds that keep plans from fitting: bytes per rank that each seed costs above the minimum of its tensors."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from autoshard.base.graph import Op, TensorMeta
from autoshard.base.spec import Spec
from autoshard.cost.memory import stored_bytes, value_bytes
from autoshard.seeds.grammar import specs_of
from autoshard.seeds.marks import is_user_collective
from autoshard.seeds.seeds import Seeds
from autoshard.space.cost_table import CostTable, build_cost_table
from autoshard.space.reachable import reachable
from autoshard.space.strategies import enumerate_strategies

OPEN = "..."


@dataclass(frozen=True)
class Pinned:
    """A seed as the user wrote it, and the bytes per rank that it holds more than the tensors would take split as far as
    they divide. A parameter counts with its gradient and optimizer state."""

    seed: str
    nbytes: int


def pinned(table: CostTable) -> tuple[Pinned, ...]:
    """The seeds that hold more than they must, the most first."""
    found: Counter[str] = Counter()
    for origin, op, meta, allowed in _held(table):
        everywhere = specs_of(OPEN, meta, table.mesh, origin)
        found[origin] += _least(table, op, meta, allowed) - _least(table, op, meta, everywhere)
    return tuple(Pinned(seed, n) for seed, n in found.most_common() if n > 0)


def without_seeds(table: CostTable, outputs: str) -> CostTable:
    """The prices when only what nobody asked for stays fixed: what is held already (see `plan_traced`), and collectives that the
    model calls itself. `outputs`: as in Options."""
    kept = {name: specs for name, specs in table.seeds.specs.items() if name not in table.seeds.origins or is_user_collective(table.graph.op(name))}
    strategies = reachable(table.graph, enumerate_strategies(table.graph, table.mesh, Seeds(kept), outputs=outputs))
    free = build_cost_table(table.graph, table.mesh, table.cluster, strategies, table.training)
    return replace(free, seeds=Seeds(kept))


def _held(table: CostTable) -> Iterator[tuple[str, Op, TensorMeta, frozenset[Spec]]]:
    """Per tensor that a seed restricts: who said so, whose it is, and what is allowed."""
    graph, seeds = table.graph, table.seeds
    for name, allowed in seeds.specs.items():
        if name in seeds.origins:
            op = graph.op(name)
            yield seeds.origins[name], op, op.outputs[0] if op.outputs else graph.meta(op.refs[0]), allowed
    for (reader, i), allowed in seeds.reads.items():
        ref = graph.op(reader).refs[i]
        yield seeds.origins[reader, i], graph.op(ref.op), graph.meta(ref), allowed


def _least(table: CostTable, op: Op, meta: TensorMeta, specs: Iterable[Spec]) -> int:
    if op.kind != "param":
        return min(value_bytes(meta, s, table.mesh) for s in specs)
    optimizer = table.training.optimizer if op.name in table.trained else None
    return min(stored_bytes(meta, s, table.mesh, optimizer) for s in specs)
