"""Ops that overwrite an argument that is not read afterwards: no second buffer, no copy before an all-reduce.

Only the eager backend needs this; inductor plans buffers by itself. The lowered graph stays functional.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from autoshard import _torch
from autoshard.collectives import RUN
from autoshard.lower.overwrite_table import OVERWRITE, takers

aten = torch.ops.aten
SENDS = tuple(kind.target for kind in RUN.values() if kind.holds_input)
"""Read their argument until they are waited for."""
MAY_ALIAS = (aten.reshape.default, aten.contiguous.default, _torch.WAIT)
"""Ops that may return their argument's memory, whatever the fake tensors say."""


def overwrite(graph: Graph) -> int:
    """Replace ops by their in-place forms where nobody can tell; returns how many. Arguments of the graph and
    what it hands out stay untouched. Needs fake values in `meta["val"]`."""
    memory = _Memory(graph)
    count = 0
    for i, node in enumerate(list(graph.nodes)):
        for k in takers(node):
            if memory.may_take(node, k, i):
                order = [node.args[k], *(a for j, a in enumerate(node.args) if j != k)]
                node.target, node.args = OVERWRITE[node.target][0], tuple(order)
                memory.join(node, order[0])
                count += 1
                break
    return count


class _Memory:
    """Which nodes share memory, and when each piece of memory is read for the last time."""

    def __init__(self, graph: Graph) -> None:
        self._root: dict[Any, Any] = {}
        self._last: dict[Any, float] = {}
        self._given: set[Any] = set()
        for node in graph.nodes:
            if node.op == "placeholder":
                self._given |= set(self._keys(node))
            if node.target in MAY_ALIAS:
                self.join(node, node.args[0])
        position = {node: float("inf") if node.op == "output" else i for i, node in enumerate(graph.nodes)}
        for node in graph.nodes:
            done = max([position[node], *(position[u] for u in node.users if node.target in SENDS)])
            for read in node.all_input_nodes:
                for root in self._group(read):
                    self._last[root] = max(self._last.get(root, -1), done)

    def may_take(self, node: Node, k: int, at: int) -> bool:
        """Whether `node` (at position `at`) may write its result over its argument `k`, which it fits."""
        mine = self._group(node.args[k])
        others = [a for j, a in enumerate(node.args) if j != k and isinstance(a, Node)]
        return (not mine & self._given and all(self._last[root] <= at for root in mine)
                and not any(self._group(o) & mine for o in others))

    def join(self, a: Node, b: Node) -> None:
        """They share memory from now on."""
        for one in self._keys(a):
            for other in self._keys(b):
                first, second = self._find(one), self._find(other)
                if first != second:
                    self._root[second] = first
                    self._last[first] = max(self._last.get(first, -1), self._last.get(second, -1))
                    if second in self._given:
                        self._given.add(first)

    def _group(self, node: Node) -> set[Any]:
        return {self._find(key) for key in self._keys(node)}

    def _find(self, key: Any) -> Any:
        while key in self._root:
            key = self._root[key]
        return key

    def _keys(self, node: Node) -> Iterator[Any]:
        """The storages of a node's value."""
        value = node.meta.get("val")
        for t in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(t, torch.Tensor):
                yield _torch.storage_key(t)
