"""Chooses what carries a program's collectives on CPUs: shared memory or gloo messages, never a functional collective (docs/runtime.md)."""
from __future__ import annotations

from collections.abc import Callable, Mapping

from torch.fx import Graph

from autoshard import _torch
from autoshard.runtime.carriers import gloo_messages, over_shared_memory
from autoshard.runtime.carriers.gloo_messages import Members
from autoshard.runtime.carriers.shared_memory import Shared

Carrier = Members | Shared
KINDS = {target: kind for kind, target in _torch.COLLECTIVES.items()} | {_torch.ALL_REDUCE_IN_PLACE: "all_reduce_"}


def carry(graph: Graph, carriers: Mapping[str, Carrier]) -> None:
    """Replace collectives of groups (by name) and their waits. Comes after passes that look at collectives."""
    for node in list(graph.nodes):
        kind, carrier = KINDS.get(node.target), carriers.get(str(node.args[-1])) if node.args else None
        if kind is None or carrier is None:
            continue
        (wait,) = node.users
        node.target, node.args = start(kind, carrier), (*node.args[:-1], carrier)
        wait.target = gloo_messages.land


def start(kind: str, carrier: Carrier) -> Callable[..., gloo_messages.Flight]:
    """Called with the arguments of the functional collective, the carrier for the group. "all_reduce_" works in place."""
    return getattr(over_shared_memory if isinstance(carrier, Shared) else gloo_messages, kind)
