"""Collectives as ops that compilers call and do not look into, for graphs that inductor compiles.

An op waits for its result, so that no order a compiler chooses puts a wait before another rank's start; what is carried by
shared memory copies at the wait anyway.
"""
from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.fx import Graph

from autoshard import _torch
from autoshard.runtime.carriers.choose import KINDS, Carrier, start
from autoshard.runtime.carriers.gloo_messages import land

TAKES = {"all_gather": "int n", "reduce_scatter": "str reduce, int n", "all_reduce": "str reduce",
         "all_to_all": "int[] received, int[] sent"}
"""Arguments between the tensor and the carrier."""


def enclose(graph: Graph, carriers: Mapping[str, Carrier]) -> None:
    """Replace collectives of groups (by name) and their waits. `carriers` must outlive the graph."""
    for node in list(graph.nodes):
        kind, carrier = KINDS.get(node.target), carriers.get(str(node.args[-1])) if node.args else None
        if kind is None or carrier is None:
            continue
        (wait,) = node.users
        _known()[id(carrier)] = carrier
        node.target, node.args = _op(kind), (*node.args[:-1], id(carrier))
        wait.replace_all_uses_with(node)
        graph.erase_node(wait)


@cache
def _known() -> WeakValueDictionary[int, Carrier]:
    """Carriers by id: a graph's constants are numbers and text."""
    return WeakValueDictionary()


@cache
def _op(kind: str) -> Any:
    name = f"{kind}_carried"
    _library().define(f"{name}(Tensor x, {TAKES[kind]}, int carrier) -> Tensor")

    def run(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        carrier = _known()[rest[-1]]
        return land(start(kind, carrier)(x.contiguous(), *rest[:-1], carrier))

    def shape(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return _torch.COLLECTIVES[kind](x, *rest[:-1], "")

    _library().impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autoshard::{name}", shape, lib=_library())
    return getattr(torch.ops.autoshard, name).default


@cache
def _library() -> torch.library.Library:
    return torch.library.Library("autoshard", "FRAGMENT")
