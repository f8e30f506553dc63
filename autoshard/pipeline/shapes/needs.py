"""Memory in the floors of shapes: what blocks hold whatever the plan is, and the seconds at which a plan goes without some of it.

A value that forward makes and backward reads is kept, or backward makes it again: its op runs once more. So a rank that holds n micro-batches of

    sum of stored + n (sum of kept) <= limit

and at any price r >= 0 of a byte it works, in a step, at least

    what it works in ample memory + sum over values of min(seconds again, r n bytes) + r (sum of stored - limit)

since what it keeps is paid back by the limit. That is a sum over blocks and one constant, so that the partition search takes it as it takes seconds.
It is highest at a price at which some value is as dear to keep as to make again; those are tried. Not more is assumed of layouts than that nothing
is smaller than its part of a stage's devices; and, as in all floors, that making a value again saves no communication.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autoshard.base.graph import Graph, Op, Ref
from autoshard.cost.cluster import Cluster
from autoshard.formulate.values import is_saved, storage_root
from autoshard.pipeline.cutting.blocks import Blocks, forward_calls
from autoshard.pipeline.cutting.cut_points import op_seconds
from autoshard.pipeline.cutting.repeated import repeated_ops
from autoshard.program.flow import param_derived
from autoshard.recompute.rewrite import candidates
from autoshard.rules import registry
from autoshard.rules.states import written_in_place

PRICES = 12
"""About so many prices of a byte are tried."""
BEYOND = (10.0, 1e4)
"""Times the highest of them: what cannot be made again, and does not fit, is far too dear at these."""


@dataclass(frozen=True, eq=False)
class Needs:
    """Of the ops whose results backward reads: their block, seconds to make them again (infinite where that cannot be) and bytes, of all
    micro-batches of a step together; whether computing them hides communication. `stored`: bytes of each block that are there always, `gradients`
    those that are accumulated. All are of one rank, where every tensor is split over all of a stage's devices; `limit`: bytes that the rank has."""

    block: np.ndarray
    seconds: np.ndarray
    nbytes: np.ndarray
    heavy: np.ndarray
    stored: np.ndarray
    gradients: np.ndarray
    limit: float

    def on(self, devices: int) -> Needs:
        """Those of one device, on each of `devices`."""
        return replace(self, seconds=self.seconds / devices, nbytes=self.nbytes / devices, stored=self.stored / devices,
                       gradients=self.gradients / devices)

    def again(self, block: int, microbatches: int, flying: int) -> float:
        """Seconds of a step for each byte of a block's values that is made again, where so many micro-batches are held; 0 where nothing can be."""
        here = (self.block == block) & np.isfinite(self.seconds)
        nbytes = self.nbytes[here].sum() * flying / microbatches
        return float(self.seconds[here].sum() / nbytes) if nbytes else 0.0

    def always(self, microbatches: int) -> np.ndarray:
        """Bytes of each block, however many micro-batches are in flight."""
        return self.stored + (self.gradients if microbatches > 1 else 0.0)

    @cached_property
    def _alike(self) -> np.ndarray:
        """Seconds per byte at which a value is as dear to keep as to make again."""
        each = np.unique((self.seconds / self.nbytes)[np.isfinite(self.seconds) & (self.nbytes > 0) & (self.seconds > 0)])
        some = each[np.unique(np.linspace(0, len(each) - 1, PRICES).astype(int))] if len(each) else np.zeros(0)
        return np.append(some, some[-1:, None] * np.array(BEYOND))

    def worth_trying(self, microbatches: int, count: float) -> np.ndarray:
        """Prices of a byte for who holds `count` micro-batches; none where all blocks fit."""
        all_of_it = self.always(microbatches).sum() + count / microbatches * self.nbytes.sum()
        return self._alike * microbatches / count if count and all_of_it > self.limit else np.zeros(0)

    def kept(self, price: float, microbatches: int, count: float, heavy: float) -> np.ndarray:
        """[block]: seconds of a step for values made again, and the price of what is kept instead and of what is always there. `count`: micro-batches
        that are held; `heavy`: the part of a second of computing that counts where it hides communication."""
        each = np.minimum(self.seconds * np.where(self.heavy, heavy, 1.0), price * count / microbatches * self.nbytes)
        return np.bincount(self.block, each, len(self.stored)) + price * self.always(microbatches)


def added(values: np.ndarray) -> np.ndarray:
    """[..., a, b]: the sum over blocks a..b-1, of values [..., block]; nothing where b <= a."""
    before = np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(values, axis=-1)], axis=-1)
    return np.triu(before[..., None, :] - before[..., :, None])


def needs_of(blocks: Blocks, accumulated: Graph, stored: Callable[[Op], float], cluster: Cluster, limit: float) -> Needs:
    """Of a training step on one device. `accumulated`: the program of a micro-batch, for what it accumulates gradients in. `stored`: bytes of a
    parameter and of what an optimizer has of it, or of a buffer. Parameters that several blocks read are left out: a stage may have them for one
    of them only; so is what every stage makes for itself, and what is made of parameters alone."""
    graph, count = blocks.graph, len(blocks.blocks)
    values = list(_values(blocks, cluster))
    block, seconds, nbytes, heavy = (np.array(column) for column in zip(*values)) if values else (np.zeros(0, dtype=np.int64), *3 * [np.zeros(0)])
    always, gradients = np.zeros(count), np.zeros(count)
    for op, at in _owned(blocks).items():
        always[at] += stored(graph.op(op))
        made = accumulated.by_name.get(f"sum:{graph.op(op).target}")
        gradients[at] += made.outputs[0].nbytes if made is not None and made.outputs[0] is not None else 0.0
    return Needs(block, seconds, nbytes, heavy, always, gradients, limit)


def _values(blocks: Blocks, cluster: Cluster) -> list[tuple[int, float, float, bool]]:
    """(block, seconds, bytes, heavy) of every op of forward whose results backward reads, whether as they are or through views. An op is run again
    for all of them at once."""
    graph, again = blocks.graph, frozenset(candidates(blocks.graph))
    left_out = repeated_ops(graph) | written_in_place(graph)
    read: dict[Ref, float] = defaultdict(float)
    for op in forward_calls(graph):
        for i, meta in enumerate(op.outputs):
            if meta is not None and is_saved(graph, Ref(op.name, i)):
                root = storage_root(graph, Ref(op.name, i))
                read[root] = max(read[root], min(meta.nbytes, graph.meta(root).nbytes))
    made: dict[str, float] = defaultdict(float)
    for root, nbytes in read.items():
        if root.op in blocks.of_op and root.op not in left_out:
            made[root.op] += nbytes
    return [(blocks.of_op[name], op_seconds(graph, name, cluster) if name in again else np.inf, nbytes, registry.is_heavy(graph.op(name)))
            for name, nbytes in made.items()]


def _owned(blocks: Blocks) -> Mapping[str, int]:
    """The block of every parameter that one block alone reads."""
    graph, derived = blocks.graph, param_derived(blocks.graph)
    readers: dict[str, set[int]] = defaultdict(set)
    of: dict[Ref, str] = {}
    for op in graph.ops:
        if op.kind == "param":
            of[Ref(op.name)] = op.name
        for ref in op.refs:
            if ref in of and Ref(op.name) in derived:
                of[Ref(op.name)] = of[ref]
            elif ref in of and op.name in blocks.of_op:
                readers[of[ref]].add(blocks.of_op[op.name])
    return {name: next(iter(at)) for name, at in readers.items() if len(at) == 1}
