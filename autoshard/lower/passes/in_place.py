"""Ops that overwrite an argument that is not read afterwards: no second buffer, no copy before an all-reduce.

Only the eager backend needs this; inductor plans buffers by itself. The lowered graph stays functional.
"""
from __future__ import annotations

import torch
from torch.fx import Graph, Node

from autoshard import _torch
from autoshard.lower.lifetimes import Lifetimes, storages
from autoshard.lower.overwrite_table import OVERWRITE, others, takers

aten = torch.ops.aten
MAY_ALIAS = (aten.reshape.default, aten.contiguous.default, _torch.WAIT)
"""Ops that may return their argument's memory, whatever the fake tensors say."""


def overwrite(graph: Graph, lifetimes: Lifetimes | None = None) -> int:
    """Replace ops by their in-place forms where nobody can tell; returns how many. Arguments of the graph, those
    aside that hold a state, and what it hands out stay untouched. Needs fake values in `meta["val"]`."""
    lifetimes = lifetimes or Lifetimes.of(graph)
    memory = _Memory(graph, lifetimes)
    count = 0
    for node in graph.nodes:
        for k in takers(node):
            if memory.may_take(node, k, lifetimes.position[node]):
                order = [node.args[k], *(a for j, a in enumerate(node.args) if j != k)]
                node.target, node.args = OVERWRITE[node.target][0], tuple(order)
                memory.join(node, order[0])
                count += 1
                break
    return count


class _Memory:
    """Which nodes share memory, in place and maybe aliased, and when each piece of memory is read for the last time."""

    def __init__(self, graph: Graph, lifetimes: Lifetimes) -> None:
        self._root: dict[int, int] = {}
        self._last = dict(lifetimes.last_read)
        self._given = {key for node in graph.nodes if node.op == "placeholder" and not node.meta.get("lent") for key in storages(node)}
        for node in graph.nodes:
            if node.target in MAY_ALIAS:
                self.join(node, node.args[0])

    def may_take(self, node: Node, k: int, at: int) -> bool:
        """Whether `node` (at position `at`) may write its result over its argument `k`, which it fits."""
        mine = self._group(node.args[k])
        return (not mine & self._given and all(self._last[root] <= at for root in mine)
                and not any(self._group(o) & mine for o in others(node, k)))

    def join(self, a: Node, b: Node) -> None:
        """They share memory from now on."""
        for one in storages(a):
            for other in storages(b):
                first, second = self._find(one), self._find(other)
                if first != second:
                    self._root[second] = first
                    self._last[first] = max(self._last[first], self._last[second])
                    if second in self._given:
                        self._given.add(first)

    def _group(self, node: Node) -> set[int]:
        return {self._find(key) for key in storages(node)}

    def _find(self, key: int) -> int:
        while key in self._root:
            key = self._root[key]
        return key
