"""Kinds of collectives: a file each, and the table below. To add one, write its file and its row (docs/collectives.md).

Seconds of one collective over one mesh axis: alpha-beta models, the cheapest algorithm as a library would pick.

**Bytes convention**, per rank, used everywhere (plans, reports, run-time checks): `nbytes` is
    all_gather                                  the OUTPUT buffer (n times the local input)
    reduce_scatter                              the INPUT buffer (n times the local output)
    all_reduce, all_to_all, mirror, broadcast   the local buffer (input and output have the same size)
    all_to_all_rows                             the rows that a rank sends in a balanced load
    send_recv                                   the buffer one rank sends while it receives another

**Symbols**: S = nbytes, n = ranks; a link has o = overhead (s per call), a = latency (s per step) and
B = bandwidth x efficiency / oversubscription (bytes/s, the bus bandwidth of nccl-tests). On an axis with levels
(link_0, n_0), (link_1, n_1), ... (innermost first) a flat algorithm runs over all n = n_0 n_1 ... ranks:
    A_ring = (n - m) a_0 + (m - 1) a_1    with m = n_1 nodes: of n - 1 hops m - 1 cross nodes
    A_log  = sum_l ceil(log2 n_l) a_l
    W/B    = max_l W / (B_l n_0 ... n_(l-1))    W bytes on the wire; every device of a node has its own network card
and o is that of the outermost link. Besides, "per level" runs the collective once on each level.

**Measured links**: where the profile holds a curve for a collective (`autoshard calibrate` writes them), curve(W) stands
for o + W/B on that level, and the ring's latency for all of the library's choices: the curve has them in it.

**In-network reduction**: a switch that reduces (o', B' of the link) sends every byte once to and once from each device, so
its all_reduce takes o' + S/B' however many ranks there are.

**Sources**: bus bandwidth, (n-1)/n and 2(n-1)/n: nccl-tests, doc/PERFORMANCE.md. Hop counts of ring and tree: NCCL,
src/graph/tuning.cc. Logarithmic gather and scatter, Bruck and direct all-to-all: Thakur, Rabenseifner, Gropp,
"Optimization of Collective Communication Operations in MPICH", IJHPCA 2005. Double binary trees: Sanders, Speck, Traeff,
"Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 35, 2009.

Properties (tests/collectives/test_seconds.py): 0 on one rank; monotone in bytes and, for axes aligned with nodes, in
ranks; an all_reduce costs between max(rs, ag) and rs + ag where no curve says otherwise; for the same local input an
all_to_all (S) costs no more than an all_gather (n S). At equal *nbytes* across nodes it may cost more: each byte of an
all_to_all crosses the network once per rank, a gathered one once per node.
"""
from __future__ import annotations

from typing import Any, overload

import numpy as np

from autoshard.collectives.all_gather import ALL_GATHER
from autoshard.collectives.all_reduce import ALL_REDUCE
from autoshard.collectives.all_to_all import ALL_TO_ALL
from autoshard.collectives.all_to_all_rows import ALL_TO_ALL_ROWS
from autoshard.collectives.broadcast import BROADCAST
from autoshard.collectives.kind import Collective
from autoshard.collectives.levels import Axis
from autoshard.collectives.mirror import MIRROR
from autoshard.collectives.reduce_scatter import REDUCE_SCATTER
from autoshard.collectives.send_recv import SEND_RECV
from autoshard.errors import ClusterError

KINDS: dict[str, Collective] = {c.name: c for c in (ALL_GATHER, ALL_TO_ALL, ALL_REDUCE, REDUCE_SCATTER, MIRROR, BROADCAST, SEND_RECV,
                                                 ALL_TO_ALL_ROWS)}
"""In the order in which equally cheap steps of a redistribution are preferred."""
RUN: dict[str, Collective] = {name: c for name, c in KINDS.items() if c.exchange is not None}
"""Those that plans run."""
KIND_OF: dict[Any, Collective] = {op: c for c in RUN.values() for op in (c.target, c.in_place) if op is not None}
"""Of the ops that programs call."""


@overload
def seconds(kind: str, nbytes: float, axis: Axis) -> float: ...
@overload
def seconds(kind: str, nbytes: np.ndarray, axis: Axis) -> np.ndarray: ...
def seconds(kind: str, nbytes: float | np.ndarray, axis: Axis) -> float | np.ndarray:
    """Seconds of collective `kind` with `nbytes` (convention above; an array gives an array) over `axis`.

    0 on one rank, and for 0 bytes: nothing is sent then. Raises ClusterError for an unknown kind.

    >>> seconds("all_gather", 1e9, axis)   # 8 H100 on NVLink: 24e-6 + 7 x 1.9e-6 + 7/8 x 1e9 / 369e9 = 2.409 ms
    """
    if kind not in KINDS:
        raise ClusterError(f"no formula for collective {kind!r}; there are {', '.join(KINDS)}")
    size = np.asarray(nbytes, dtype=np.float64)
    out = np.where(size > 0, KINDS[kind].seconds(size, axis.levels), 0.0) if axis.size > 1 else np.zeros_like(size)
    return out if size.ndim else float(out)


def wire_bytes(kind: str, nbytes: float, n: int) -> float:
    """W: bytes one rank sends in a ring of `n`, what a measured curve is a function of."""
    return nbytes * KINDS[kind].per_byte(n)


def ring_steps(kind: str, n: int) -> int:
    """Steps that pay a link's latency when measured curves are used: a curve holds what is left without them."""
    return KINDS[kind].steps(n)


def kind_between(source: int, target: int) -> str:
    """The kind of collective that changes placement `source` of a mesh axis to `target`. Raises ClusterError where none does."""
    for name, c in RUN.items():
        if c.changes(source, target):
            return name
    raise ClusterError(f"no collective changes placement {source} to {target}")
