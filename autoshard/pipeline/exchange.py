"""What tied weights cost: ranks that share a parameter send each other their parts of its gradient once a step, and sum them
(runtime/pipeline/tied.py)."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from autoshard.base.plan import Plan
from autoshard.base.roles import Role
from autoshard.cost.cluster import Device
from autoshard.cost.compute import op_seconds
from autoshard.cost.memory import value_bytes
from autoshard.pipeline.pipelined import Pipelined
from autoshard.rules.family import Family


@dataclass(frozen=True)
class Part:
    """The part of a gradient that a stage sends to another rank of the pipeline's axis: local bytes."""

    name: str
    source: int
    target: int
    nbytes: int
    dtype: torch.dtype


def parts(made: Pipelined, plans: Sequence[Plan]) -> Iterator[Part]:
    """Every message. `plans`: one per stage, of which `ops` is read."""
    rank_of = made.table.rank_of
    for name, stages in made.cut.tied:
        holders = made.holders(name)
        for s in stages:
            graph = made.cut.stages[s].graph
            grad = graph.outputs(Role.GRADIENT)[name]
            meta = graph.meta(grad.refs[0])
            nbytes = value_bytes(meta, plans[s].ops[grad.name].inputs[0], made.submesh)
            yield from (Part(name, rank_of[s], r, nbytes, meta.dtype) for r in holders if r != rank_of[s])


def exchange_seconds(made: Pipelined, plans: Sequence[Plan], device: Device, send: Callable[[Part], float]) -> list[float]:
    """By rank, seconds at the end of a step: what it sends and what it receives, one message after the other in each direction, and the sum of the
    parts. `send`: seconds of a message. Example: two ranks that share 400 MB at 40 GB/s with 2 TB/s of memory take 10 ms and 3 x 400 MB / 2 TB/s =
    0.6 ms."""
    sent, arrived, summed = ([0.0] * len(made.table.ranks) for _ in range(3))
    found = list(parts(made, plans))
    for part in found:
        sent[part.source] += send(part)
        arrived[part.target] += send(part)
    rank_of = made.table.rank_of
    local = {part.name: part for part in found}
    for name, stages in made.cut.tied:
        if name in local:
            add = float(op_seconds(Family.POINTWISE, 0, 3 * local[name].nbytes, local[name].dtype, device, "add"))
            for r in {rank_of[s] for s in stages}:
                summed[r] += (len(stages) - 1) * add
    return [max(out, into) + work for out, into, work in zip(sent, arrived, summed, strict=True)]
