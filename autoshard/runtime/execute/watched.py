"""The eager backend with every call of a local graph wrapped, for whoever clocks, replaces or delays calls."""
from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autoshard import _torch
from autoshard.collectives import KIND_OF
from autoshard.lower.emit import Part
from autoshard.lower.lifetimes import Lifetimes
from autoshard.lower.lower import call_of
from autoshard.lower.passes.in_place import overwrite
from autoshard.lower.schedule import CollectiveCall
from autoshard.runtime.carriers.choose import carry
from autoshard.runtime.execute.eager import straight


@dataclass(frozen=True)
class Doing:
    """One call of a local graph. `kind`: "op", "copy" (it rearranges what a redistribution sends or receives), "call" (a collective is started)
    or "wait" (for it). `name`: of the plan's op, or of the value that moves; `at`: position in its window; `call`: the collective of a call and of
    its wait, `started`: the position of that call."""

    kind: str
    name: str
    window: str
    at: int
    call: CollectiveCall | None = None
    started: int = -1


Around = Callable[[Doing, Callable[..., Any]], Callable[..., Any]]
"""Gives what is called in the place of a function."""


def watched(around: Around, axes: Mapping[str, str]) -> Callable[[GraphModule, str], Callable[[list[Any]], Sequence[torch.Tensor]]]:
    """A backend that runs what `eager` runs, each call through what `around` gives for it. `axes`: mesh axes by the names of their
    process groups."""
    def backend(module: GraphModule, name: str) -> Callable[[list[Any]], Sequence[torch.Tensor]]:
        lifetimes = Lifetimes.of(module.graph)
        overwrite(module.graph, lifetimes)
        doing = described(module.graph.nodes, name, axes)
        carry(module.graph, module.meta.get("carriers", {}))
        for node, what in doing.items():
            node.target = around(what, _torch.kernel(node.target) if isinstance(node.target, torch._ops.OpOverload) else node.target)
        return straight(module.graph, name, lifetimes)

    return backend


def described(nodes: Sequence[Node], window: str, axes: Mapping[str, str]) -> dict[Node, Doing]:
    """What the calls of a bound graph are, in order; taking an item out of a result is none."""
    waits: dict[Node, Doing] = {}
    out: dict[Node, Doing] = {}
    for node in nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        part, at = node.meta.get("part") or Part("compute", node.name, window), len(out)
        if node in waits:
            out[node] = replace(waits[node], kind="wait", at=at)
        elif node.target in KIND_OF:
            out[node] = Doing("call", part.name, part.window, at, call_of(node, axes[str(node.args[-1])]), at)
            waits |= dict.fromkeys(node.users, out[node])
        else:
            out[node] = Doing("op" if part.kind == "compute" else "copy", part.name, part.window, at)
    return out
