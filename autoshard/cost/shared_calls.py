"""What a small gradient's reduction costs: its share of a call that several gradients are reduced in (lower/buckets.py).

Reductions of gradients up to SMALL bytes wait for each other. Which of them share a call is known when the step is scheduled, long after an op's
strategy is priced. As if all small gradients of the graph shared full calls, or one if they are fewer bytes, each takes an equal part of what
these cost at any size, and by its bytes a part of the rest and of the copy into a call's buffer; at most what a call of its own takes. So the fixed
cost (0.5 ms by gloo's messages) is paid once by a hundred biases, not a hundred times, and bytes cost what they do in a long message.
"""
from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch

from autoshard import collectives
from autoshard.base.graph import Graph
from autoshard.base.plan import IN_FLIGHT
from autoshard.base.roles import Role
from autoshard.cost.cluster import AxisLink, Device
from autoshard.cost.compute import op_seconds
from autoshard.rules.family import Family

SMALL = 4 << 20
"""Bytes of a gradient up to which a call's fixed cost outweighs copying it: by gloo a call takes 0.5 ms, and 0.8 of the thread that computes."""
BUCKETS = 4
"""Full calls that gradients share, of which all the bytes are that may be on their way at once. Fewer and larger ones would only make the first
gradient in them wait longer."""
REDUCTIONS = tuple(name for name, kind in collectives.RUN.items() if kind.runs.reduces)
"""Kinds whose results on several tensors side by side are their results on each."""


def shares(kind: str, nbytes: int) -> bool:
    """Whether a gradient's reduction may be one call with others."""
    return kind in REDUCTIONS and 0 < nbytes <= SMALL


def full_call(in_flight: int) -> int:
    """The most bytes of a call that gradients share, where so many may be on their way at once."""
    return max(1, in_flight // BUCKETS)


class Together(NamedTuple):
    """Gradients that are thought to share calls: how many there are, their bytes, and the most bytes of a call."""

    count: int
    nbytes: int
    bucket: int = full_call(IN_FLIGHT)


UNKNOWN = Together(0, 0)
"""Nobody knows which: a share may cost next to nothing, as where a curve is flat. For bounds."""


def small_gradients(graph: Graph, in_flight: int = IN_FLIGHT) -> Together | None:
    """Those of a graph; None where there are none. `in_flight`: bytes of gradients that may be on their way at once."""
    ends = dict.fromkeys(op.refs[0] for op in graph.outputs(Role.GRADIENT).values() if op.refs)
    sizes = [prod(meta.logical_shape) * meta.dtype.itemsize for meta in map(graph.meta, ends)]
    small = [n for n in sizes if 0 < n <= SMALL]
    return Together(len(small), sum(small), full_call(in_flight)) if small else None


def share_seconds(kind: str, nbytes: int, others: Together | None, link: AxisLink, device: Device) -> float:
    """Seconds of a collective on a gradient of `nbytes`: its share of a call with `others` where there are such and it may be one, else of
    a call of its own. In smaller calls it is never cheaper: what is proven of plans with full ones holds for all."""
    own = collectives.seconds(kind, nbytes, link)
    if link.size == 1 or others is None or not shares(kind, nbytes):
        return own
    if others == UNKNOWN:
        return 0.0
    return min(own, max(_share(kind, nbytes, others._replace(bucket=most), link, device) for most in {others.bucket, full_call(IN_FLIGHT)}))


def _share(kind: str, nbytes: int, others: Together, link: AxisLink, device: Device) -> float:
    full, fixed = min(others.nbytes, others.bucket), collectives.seconds(kind, 1, link)
    call = collectives.seconds(kind, full, link) + float(op_seconds(Family.COPY, 0, 2 * full, torch.uint8, device))
    return others.nbytes / full * fixed / others.count + nbytes / full * (call - fixed)
