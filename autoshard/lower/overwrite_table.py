"""Which argument an op's result may overwrite if the argument is not read afterwards: used by the pass that does it
(lower/passes/in_place.py) and by the timeline."""
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from autoshard.collectives import RUN
from autoshard.lower.emit import is_dense
from autoshard.lower.slice_writes import WRITE_SELECT, WRITE_SLICE

aten = torch.ops.aten
OVERWRITE = {
    aten.add.Tensor: (aten.add_.Tensor, (0, 1)),
    aten.mul.Tensor: (aten.mul_.Tensor, (0, 1)),
    aten.sub.Tensor: (aten.sub_.Tensor, (0,)),
    aten.div.Tensor: (aten.div_.Tensor, (0,)),
    aten.relu.default: (aten.relu_.default, (0,)),
    aten.index_copy.default: (aten.index_copy_.default, (0,)),
    aten.index_put.default: (aten.index_put_.default, (0,)),
    aten._unsafe_index_put.default: (aten.index_put_.default, (0,)),
    aten.scatter.src: (aten.scatter_.src, (0,)),
    aten.scatter.value: (aten.scatter_.value, (0,)),
    aten.slice_scatter.default: (WRITE_SLICE, (0,)),
    aten.select_scatter.default: (WRITE_SELECT, (0,)),
    aten.copy.default: (aten.copy_.default, (0,)),
    **{kind.target: (kind.in_place, (0,)) for kind in RUN.values() if kind.in_place is not None},
}
"""Functional op -> its in-place form, and the arguments whose memory may take the result."""


def takers(node: Node) -> Iterator[int]:
    """Positions of arguments that the result of `node` fits over, best first. Needs fake values in `meta["val"]`."""
    for k in OVERWRITE.get(node.target, (None, ()))[1]:
        x = node.args[k]
        if isinstance(x, Node) and not (k > 0 and (node.kwargs or len(node.args) > 2)) and _fits(x.meta["val"], node.meta["val"]):
            yield k


def others(node: Node, k: int) -> list[Node]:
    """The nodes that `node` reads beside its argument `k`."""
    found: list[Node] = []
    map_arg((node.args[:k] + node.args[k + 1:], node.kwargs), lambda n: found.append(n) or n)
    return found


def _fits(old: object, new: torch.Tensor) -> bool:
    return (isinstance(old, torch.Tensor) and old.shape == new.shape and old.dtype == new.dtype and old.stride() == new.stride()
            and is_dense(old))


SWAP, LATE_SWAP = 4 << 20, 64 << 10
"""Bytes up to which two ranks add up whole buffers, where they wait at once and where compute comes before the wait; above, gloo's pipelined
all-reduce takes less CPU. Beside compute it does from early on: its threads add up, and no pages are needed for what arrives."""


def swaps(ranks: int, nbytes: int, late: bool = False) -> bool:
    """Whether an all-reduce of `nbytes` over gloo is made of messages, which takes a buffer for what arrives. `late`: it is not waited for at
    once."""
    return ranks == 2 and nbytes <= (LATE_SWAP if late else SWAP)
