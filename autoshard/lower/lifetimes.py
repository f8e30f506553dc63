"""When the values of a local graph die, and which of them share memory: one account for the footprint of an op, the pass that overwrites
dead memory, and whatever runs the graph.

A variable dies with the last node that reads it. Memory dies when no variable looks at it any more; what a collective sends is
read until the collective is waited for. Between instructions the schedule says which values die (`Instruction.frees`).
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, Node

from autoshard import _torch
from autoshard.collectives import RUN

SENDS = tuple(kind.target for kind in RUN.values() if kind.holds_input)
"""Collectives that read their argument until they are waited for; what can work in place works on a copy of its own."""
END = 1 << 60
"""Position of what the graph hands out."""


@dataclass(frozen=True, eq=False)
class Lifetimes:
    """Of a graph whose nodes have their (fake) values in `meta["val"]`. Replacing a node's target, or the order of its arguments,
    changes nothing here; other changes of the graph do. `position`: of each node that computes, and -1 of arguments."""

    graph: Graph
    position: Mapping[Node, int]

    @staticmethod
    def of(graph: Graph) -> "Lifetimes":
        computing = (n for n in graph.nodes if n.op not in ("placeholder", "output"))
        position = dict.fromkeys(graph.nodes, -1) | {n: i for i, n in enumerate(computing)}
        return Lifetimes(graph, position | {n: END for n in graph.nodes if n.op == "output"})

    @cached_property
    def dead_after(self) -> Mapping[Node, tuple[Node, ...]]:
        """The variables that no later node reads, by the last one that does; a node that nobody reads is its own last. What is handed
        out is in no list, nor is an argument that nobody reads (`unread`)."""
        last: dict[Node, Node] = {}
        for node in self.graph.nodes:
            if not node.users and node.op == "call_function":
                last[node] = node
            last.update(dict.fromkeys(node.all_input_nodes, node))
        out: dict[Node, list[Node]] = {}
        for value, at in last.items():
            if at.op != "output":
                out.setdefault(at, []).append(value)
        return {node: tuple(dead) for node, dead in out.items()}

    @property
    def unread(self) -> tuple[Node, ...]:
        """Arguments that no node reads."""
        return tuple(n for n in self.graph.nodes if n.op == "placeholder" and not n.users)

    @cached_property
    def last_read(self) -> Mapping[int, int]:
        """Per storage, the position up to which something reads it: that of its maker where nothing does, END if it is handed out."""
        out: dict[int, int] = {}
        for node in self.graph.nodes:
            until = max((self._until(user) for user in node.users), default=self.position[node])
            for key in storages(node):
                out[key] = max(out.get(key, -1), until)
        return out

    def _until(self, user: Node) -> int:
        """Where a reader lets go of what it reads."""
        waits = user.users if user.target in SENDS else ()
        return max(self.position[user], *(self.position[wait] for wait in waits if wait.op != "output"), -1)


def tensors(node: Node) -> list[torch.Tensor]:
    """The tensors of a node's value."""
    value: Any = node.meta.get("val")
    return [t for t in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(t, torch.Tensor)]


def storages(node: Node) -> Iterator[int]:
    """Keys of the memory that a node's value looks at: views have that of their base."""
    return (_torch.storage_key(t) for t in tensors(node))


def makers(graph: Graph) -> Mapping[int, Node | None]:
    """Per storage, the node that makes it; None for that of an argument."""
    out: dict[int, Node | None] = {}
    for node in graph.nodes:
        for key in storages(node):
            out.setdefault(key, None if node.op == "placeholder" else node)
    return out
