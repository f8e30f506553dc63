"""Blocks: stretches of the forward pass between which a model may be cut into stages.

A block is a submodule of a list ("layers.3"), or what runs between such submodules. An op that runs early and is read late only
(the embedding of a decoder behind an encoder) belongs to the block of its readers: its value would cross every cut between them."""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from autoshard.base.graph import FORWARD, Graph, Op, Ref
from autoshard.pipeline.cutting.repeated import repeated_ops


@dataclass(frozen=True)
class Block:
    """`name`: path of the module that begins it; `start`: the number in the trace (`Op.traced_at`) of its first op."""

    name: str
    start: int


@dataclass(frozen=True)
class Blocks:
    """The blocks of a graph in order of execution, and the block of every forward op by name."""

    graph: Graph
    blocks: tuple[Block, ...]

    @staticmethod
    def of(graph: Graph) -> Blocks:
        return Blocks(graph, tuple(_blocks(graph)))

    @cached_property
    def of_op(self) -> Mapping[str, int]:
        """Index of the block of every forward call."""
        starts = [b.start for b in self.blocks]
        calls = forward_calls(self.graph)
        return _sunk(self.graph, calls, {op.name: max(0, bisect_right(starts, op.traced_at) - 1) for op in calls})

    @cached_property
    def _numbers(self) -> tuple[list[int], list[int]]:
        pairs = sorted((op.traced_at, self.of_op[op.name]) for op in forward_calls(self.graph))
        return [n for n, _ in pairs], [b for _, b in pairs]

    def at(self, traced_at: int) -> int:
        """The block of a position in the trace. The op that was there may be simplified away: then that of the op before it."""
        numbers, found = self._numbers
        return found[max(0, bisect_right(numbers, traced_at) - 1)]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(b.name for b in self.blocks)


def forward_calls(graph: Graph) -> tuple[Op, ...]:
    return tuple(op for op in graph.of_kind("call") if op.phase == FORWARD)


def _blocks(graph: Graph) -> list[Block]:
    """A block begins where a module of its label runs for the first time. Ops that every stage repeats begin none."""
    repeated = repeated_ops(graph)
    calls = sorted((op for op in forward_calls(graph) if op.name not in repeated), key=lambda op: op.traced_at)
    depth = min((i for op in calls for i, part in enumerate(op.module.split(".")) if part.isdigit()), default=1)
    found: list[Block] = []
    seen: set[str] = set()
    for op in calls:
        label = _label(op.module, max(depth, 1))
        if not found or (label and label not in seen):
            found.append(Block(label, op.traced_at))
        seen.add(label)
    return found


def _label(module: str, depth: int) -> str:
    """The outermost list item that a module is in; of others the path down to where the lists are."""
    parts = module.split(".") if module else []
    indices = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[:indices[0] + 1] if indices else parts[:depth])


def _sunk(graph: Graph, calls: tuple[Op, ...], block: dict[str, int]) -> dict[str, int]:
    """Ops moved to the block of their first reader, where that is not the next one. They take with them what feeds them, so that must be
    in their block, and a block does not move as a whole: where it lies is for whoever chooses the cuts. Repeats until nothing
    changes: whether an op moves depends on its readers and on what it reads."""
    readers = {op.name: {u for i in range(len(op.outputs)) for u, _ in graph.users.get(Ref(op.name, i), ())} for op in calls}
    stays = {name for name, its in readers.items() if not its or any(graph.op(u).kind == "output" for u in its)}
    while True:
        now = dict(block)
        for op in reversed(calls):
            later = [now[u] for u in readers[op.name] if u in now]
            if op.name not in stays and later and min(later) > block[op.name] + 1:
                now[op.name] = min(later)
        left = {op.name for op in calls if now[op.name] != block[op.name] and any(
            r.op in now and (block[r.op] != block[op.name] or now[r.op] == block[r.op]) for r in op.refs)}
        if not left:
            kept = {block[name] for name in now if now[name] == block[name]}
            left = {name for name in now if block[name] not in kept}
        if not left:
            return now
        stays |= left
