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

from autoshard.base.custom_op import custom_op
from autoshard.collectives import RUN
from autoshard.runtime.carriers.choose import Carrier, carried, start, start_rows
from autoshard.runtime.carriers.gloo_messages import land


def enclose(graph: Graph, carriers: Mapping[str, Carrier]) -> None:
    """Replace collectives of groups (by name) and their waits. `carriers` must outlive the graph."""
    for node, kind, carrier in carried(graph, carriers):
        (wait,) = node.users
        _known()[id(carrier)] = carrier
        if kind.runs.sized:
            node.target, node.args = _rows_op(), (*node.args[:-1], kind.name, id(carrier))
        else:
            node.target, node.args = _op(), (node.args[0], kind.name, kind.reduce_op(node.args[1:]), id(carrier))
        wait.replace_all_uses_with(node)
        graph.erase_node(wait)


@cache
def _known() -> WeakValueDictionary[int, Carrier]:
    """Carriers by id: a graph's constants are numbers and text."""
    return WeakValueDictionary()


@cache
def _op() -> Any:
    """A collective of any kind with its wait, as one op."""
    def run(x: torch.Tensor, kind: str, op: str, carrier: int) -> torch.Tensor:
        by = _known()[carrier]
        return land(start(RUN[kind], by, in_place=False)(x.contiguous(), op, by))

    def shape(x: torch.Tensor, kind: str, op: str, carrier: int) -> torch.Tensor:
        rows = [RUN[kind].runs.rows(n, _known()[carrier].n) for n in x.shape[:1]]  # none of a tensor without dims
        return x.new_empty((*rows, *x.shape[1:]))

    return custom_op("carried", "(Tensor x, str kind, str op, int carrier) -> Tensor", run, shape)


@cache
def _rows_op() -> Any:
    """The same for a kind whose sizes are known at run time only."""
    def run(x: torch.Tensor, sends: torch.Tensor, gets: torch.Tensor, room: int, where: str, balanced: int, kind: str,
            carrier: int) -> torch.Tensor:
        return land(start_rows(RUN[kind])(x.contiguous(), sends, gets, room, where, balanced, _known()[carrier]))

    def shape(x: torch.Tensor, sends: torch.Tensor, gets: torch.Tensor, room: int, where: str, balanced: int, kind: str,
              carrier: int) -> torch.Tensor:
        return x.new_empty((room, *x.shape[1:]))

    return custom_op("carried_rows", "(Tensor x, Tensor sends, Tensor gets, int room, str where, int balanced, str kind, int carrier) "
                     "-> Tensor", run, shape)
