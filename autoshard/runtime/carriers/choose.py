"""Chooses what carries a program's collectives on CPUs: shared memory or gloo messages, never a functional collective (docs/runtime.md)."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch.fx import Graph, Node

from autoshard.collectives import KIND_OF
from autoshard.collectives.kind import Collective
from autoshard.runtime.carriers import gloo_messages, over_shared_memory
from autoshard.runtime.carriers.gloo_messages import Members
from autoshard.runtime.carriers.shared_memory import Shared

Carrier = Members | Shared


def carry(graph: Graph, carriers: Mapping[str, Carrier]) -> None:
    """Replace collectives of groups (by name) and their waits. Comes after passes that look at collectives."""
    for node, kind, carrier in carried(graph, carriers):
        (wait,) = node.users
        wait.target = gloo_messages.land
        if kind.runs.sized:
            node.target, node.args = start_rows(kind), (*node.args[:-1], carrier)
            continue
        node.target = start(kind, carrier, node.target is kind.in_place, late=wait is not node.next)
        node.args = (node.args[0], kind.reduce_op(node.args[1:]), carrier)


def carried(graph: Graph, carriers: Mapping[str, Carrier]) -> Iterator[tuple[Node, Collective, Carrier]]:
    """Calls of collectives of these groups, each with its kind and what carries it."""
    for node in list(graph.nodes):
        kind, carrier = KIND_OF.get(node.target), carriers.get(str(node.args[-1])) if node.args else None
        if kind is not None and carrier is not None:
            yield node, kind, carrier


def start(kind: Collective, carrier: Carrier, in_place: bool, late: bool = False) -> Callable[[torch.Tensor, str, Carrier], gloo_messages.Flight]:
    """A function that starts a collective: (tensor, reduce op, carrier). `in_place`: the tensor may be overwritten; `late`: other ops come before
    the wait. Equal calls have one function, so that programs can be compared."""
    return _start(kind, isinstance(carrier, Shared), in_place, late)


@cache
def _start(kind: Collective, shared: bool, in_place: bool, late: bool) -> Callable[[torch.Tensor, str, Carrier], gloo_messages.Flight]:
    exchange: Callable[..., gloo_messages.Flight] = (over_shared_memory if shared else gloo_messages).exchange

    def begin(x: torch.Tensor, op: str, carrier: Carrier) -> gloo_messages.Flight:
        x = x.contiguous()  # a kernel may lay a result otherwise than its fake value says
        return _begun(partial(gloo_messages.in_words, kind, x, _members(carrier)), exchange, kind, x, op, carrier, in_place, late)

    return begin


@cache
def start_rows(kind: Collective) -> Callable[..., gloo_messages.Flight]:
    """A function that starts a collective with sizes of its own: (tensor, sends, gets, room, where, balanced, carrier). By messages, in shared memory
    too: its posts are of one size on all ranks."""
    def begin(x: torch.Tensor, sends: torch.Tensor, gets: torch.Tensor, room: int, where: str, balanced: int,
              carrier: Carrier) -> gloo_messages.Flight:
        group = _members(carrier)
        what = partial(gloo_messages.in_words, kind, x, group)
        return _begun(what, gloo_messages.exchange_rows, kind, x.contiguous(), sends, gets, room, where, balanced, group)

    return begin


def _begun(what: Callable[[], str], exchange: Callable[..., gloo_messages.Flight], *args: Any) -> gloo_messages.Flight:
    try:
        flight = exchange(*args)
    except RuntimeError as e:
        raise gloo_messages.failed(e, what()) from e
    flight.what = what
    return flight


def _members(carrier: Carrier) -> Members:
    return carrier.group if isinstance(carrier, Shared) else carrier
