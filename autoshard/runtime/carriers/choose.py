"""What carries a program's collectives on CPUs: memory that ranks share, messages over gloo, or gloo itself."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed import ProcessGroup
from torch.fx import Graph, Node

from autoshard import _torch
from autoshard.lower.overwrite_table import swaps
from autoshard.runtime.carriers import gloo_messages, over_shared_memory
from autoshard.runtime.carriers.shared_memory import RING, Shared

Carrier = ProcessGroup | Shared
KINDS = {target: kind for kind, target in _torch.COLLECTIVES.items() if kind != "all_reduce"} | {_torch.ALL_REDUCE_IN_PLACE: "all_reduce"}


def carry(graph: Graph, carriers: Mapping[str, Carrier]) -> None:
    """Replace collectives of groups (by name) and their waits. Needs fake values in `meta["val"]`; comes after
    passes that look at collectives."""
    for node in list(graph.nodes):
        kind, carrier = KINDS.get(node.target), carriers.get(str(node.args[-1])) if node.args else None
        if kind is None or carrier is None or not _pays(node, kind, carrier):
            continue
        (wait,) = node.users
        node.target, node.args = start(kind, carrier), (*node.args[:-1], carrier)
        wait.target = gloo_messages.land


def start(kind: str, carrier: Carrier) -> Callable[..., gloo_messages.Flight]:
    """Called with the arguments of the functional collective, the carrier for the group; all-reduces work in place."""
    module = by_memory if isinstance(carrier, Shared) else direct
    return getattr(module, "all_reduce_" if kind == "all_reduce" else kind)


def carries_all_reduce(carrier: Carrier, nbytes: int) -> bool:
    """Whether an all-reduce is not gloo's own."""
    return nbytes <= RING if isinstance(carrier, Shared) else swaps(carrier.size(), nbytes)


def _pays(node: Node, kind: str, carrier: Any) -> bool:
    if kind != "all_reduce":
        return True
    value = node.meta["val"]
    return node.args[1] in gloo_messages.COMBINE and carries_all_reduce(carrier, value.numel() * value.dtype.itemsize)
