"""Redistribution between two specs of one tensor: the cheapest sequence of steps, and its price.

A step changes the placement on one mesh axis, or on several at once that go from one placement to another together:
    slice           Replicate -> Shard(d)      free: each rank keeps its piece
    all_gather      Shard(d) -> Replicate
    all_to_all      Shard(d) -> Shard(e)
    all_reduce      Partial -> Replicate
    reduce_scatter  Partial -> Shard(d)
A step takes from a dim the minor axes of those that split it, and adds axes as the minor ones: on dim d over axis a it is legal only
while d is not split by an axis that a is major to. Nothing becomes Partial, integers never are, and sharded dims divide evenly
before and after every step.

A step over several axes is one collective over the group of all their ranks, the earlier axis major: over 2 x 2 ranks an
all_reduce of S bytes sends 3/2 S and starts once; two in turn send 2 S, or three calls (scatter, reduce, gather) 3/2 S. It
may pass over axes between them, while those do not split the dim it touches. Slices are free and stay single; axes of one
rank join nobody.

Collectives put pieces together along the first dim of a buffer. For another dim, with more than one local
element before it, lowering rearranges the buffer; that is priced as a copy (read + write):
    all_gather      output     if the local output has elements before d
    reduce_scatter  input      if the local input has elements before d
    all_to_all      input for e, output for d, likewise
On an axis of size 1 every step is free.
    step seconds = collectives.seconds(kind, nbytes, axis) + op_seconds("copy", 2 x bytes rearranged)

Which moves exist depends on (number of dims, mesh) only and is laid out once as index arrays; a shape then needs
a few vectorised prices and all-pairs shortest paths (Floyd, Algorithm 97, CACM 5(6), 1962). Layouts with inner shards (base/spec.py), which
stored tensors and their gradients alone have, are in a larger graph of their own, asked where an end has one.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product

import numpy as np
import torch

from autoshard import collectives
from autoshard.base.mesh import Mesh
from autoshard.base.spec import REDUCE_OPS, R, Spec, format_spec, is_inner, is_partial, nested, nesting, nestings, shard_counts, split_by
from autoshard.cost.cluster import AxisLink, Cluster
from autoshard.cost.compute import op_seconds
from autoshard.cost.shared_calls import Together, share_seconds
from autoshard.errors import LoweringError
from autoshard.rules.family import Family

SLICE = "slice"
"""The step that sends nothing: a rank takes its piece of what it holds."""
KINDS = (SLICE, *collectives.RUN)
HOP_BITS = 5
UNREACHABLE = np.int64(1) << 61


@dataclass(frozen=True)
class Step:
    """One step. `axes` are mesh axis indices in mesh order; dims are logical; -1 where a kind has none. `spec` is the spec
    after it. `nbytes` follows collectives/__init__.py, `rearranged` are the bytes copied besides (see above)."""

    kind: str
    axes: tuple[int, ...]
    src_dim: int
    dst_dim: int
    reduce_op: str
    nbytes: int
    rearranged: int
    seconds: float
    spec: Spec


@dataclass(frozen=True)
class Move:
    """A legal step between two states of a layout, before any shape is known."""

    src: int
    dst: int
    kind: str
    axes: tuple[int, ...]
    src_dim: int
    dst_dim: int


@dataclass(frozen=True, eq=False)
class StateGraph:
    """All states of an `ndim`-dim tensor on axes of `sizes`, and the moves between them as parallel arrays.

    cuts[s, d] = pieces of dim d in state s; groups: rows of the moves that share kind, axes and dims."""

    states: tuple[Spec, ...]
    index: dict[Spec, int]
    cuts: np.ndarray
    moves: tuple[Move, ...]
    src: np.ndarray
    dst: np.ndarray
    groups: tuple[tuple[str, tuple[int, ...], int, int, np.ndarray], ...]


def axis_sets(sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The axes that one collective may run over: each by itself, and any several that have more than one rank."""
    wide = [a for a, n in enumerate(sizes) if n > 1]
    return (*((a,) for a in range(len(sizes))), *(c for k in range(2, len(wide) + 1) for c in combinations(wide, k)))


@cache
def layout(ndim: int, sizes: tuple[int, ...], partials: tuple[int, ...], inner: bool = False, idle: tuple[int, ...] = ()) -> StateGraph:
    """States over Replicate, Shard(0..ndim-1) and at most one kind of Partial out of `partials` (sum and max on
    two axes of one tensor do not commute, so such a state has no moves and is left out); with `inner` in all nestings. `idle`: axes on which all is
    Replicate."""
    choices = (R, *range(ndim), *partials)
    states = tuple(s for s in product(*((R,) if a in idle else choices for a in range(len(sizes))))
                   if len({p for p in s if is_partial(p)}) <= 1)
    if inner:
        states += tuple(n for s in states for n in nestings(s, (2,) * len(sizes)))  # a plan may be priced for another mesh, with axes of one rank
    index = {s: i for i, s in enumerate(states)}
    cuts = np.array([shard_counts(ndim, s, sizes) for s in states], np.int64).reshape(len(states), ndim)
    moves = tuple(m for i, s in enumerate(states) for m in _moves(i, s, ndim, sizes, index))
    grouped: dict[tuple[str, tuple[int, ...], int, int], list[int]] = {}
    for row, m in enumerate(moves):
        grouped.setdefault((m.kind, m.axes, m.src_dim, m.dst_dim), []).append(row)
    ends = np.array([(m.src, m.dst) for m in moves], np.int64).reshape(-1, 2)
    return StateGraph(states, index, cuts, moves, ends[:, 0], ends[:, 1],
                  tuple((*key, np.array(rows)) for key, rows in grouped.items()))


def _moves(i: int, spec: Spec, ndim: int, sizes: tuple[int, ...], index: dict[Spec, int]) -> list[Move]:
    out, nests = [], [nesting(spec, d) for d in range(ndim)]
    for axes in axis_sets(sizes):
        p = split_by(spec[axes[0]])
        if any(split_by(spec[a]) != p for a in axes) or (p == R and len(axes) > 1):
            continue
        if p >= 0 and nests[p][len(nests[p]) - len(axes):] != axes:
            continue
        for q in range(ndim) if p == R else (R, *range(ndim)):
            j = index.get(_moved(spec, axes, q, () if q < 0 else nests[q])) if q != p else None
            if j is not None:
                out.append(Move(i, j, _kind(p, q), axes, max(p, -1), max(q, -1)))
    return sorted(out, key=lambda m: (KINDS.index(m.kind), m.axes, m.dst_dim))


def _moved(spec: Spec, axes: tuple[int, ...], q: int, there: tuple[int, ...]) -> Spec | None:
    """`spec` with `axes` at placement `q`, the minor ones behind `there` where that is a dim; None where no spec says so."""
    placed = dict.fromkeys(axes, q) if q < 0 else nested(q, (*there, *axes))
    return None if placed is None else tuple(placed.get(a, p) for a, p in enumerate(spec))


def _kind(p: int, q: int) -> str:
    return SLICE if p == R else collectives.kind_between(p, q)


@dataclass(frozen=True, eq=False)
class _Solved:
    """All pairs of one shape. keys[s, t] = (seconds in units) << HOP_BITS | steps, exact integers, so that a path
    can be read back and fewer steps win among equal prices; UNREACHABLE where there is none."""

    layout: StateGraph
    keys: np.ndarray
    move_keys: np.ndarray
    nbytes: np.ndarray
    rearranged: np.ndarray
    seconds: np.ndarray
    unit: float


class Redistribution:
    """Prices and step sequences on one (mesh, cluster). Results are kept in the instance, so two meshes or
    clusters in one process never see each other's."""

    def __init__(self, mesh: Mesh, cluster: Cluster):
        self.mesh, self.cluster = mesh, cluster
        self.links: dict[tuple[int, ...], AxisLink] = {axes: cluster.link_of(mesh, axes) for axes in axis_sets(mesh.sizes)}
        self._solved: dict[tuple, _Solved] = {}
        self._steps: dict[tuple, tuple[Step, ...]] = {}
        self._ways: dict[tuple[int, Together], np.ndarray] = {}
        self._savings: dict[tuple[str, tuple[int, ...], int, Together], float] = {}

    def table(self, shape: tuple[int, ...], dtype: torch.dtype, sources: Sequence[Spec],
              targets: Sequence[Spec], others: Together | None = None) -> np.ndarray:
        """Seconds [len(sources), len(targets)] (float64) of the cheapest sequence for a tensor of logical `shape`;
        inf where there is none; 0 where source and target are equal. `others`: of a gradient, whose small reductions share calls
        with these (shared_calls.py), on the same way."""
        out = self._prices(shape, dtype, sources, targets, False, others)
        inner = [[any(map(is_inner, s)) for s in specs] for specs in (sources, targets)]
        if any(map(any, inner)):
            return np.where(np.logical_or.outer(*inner), self._prices(shape, dtype, sources, targets, True, others), out)
        return out

    def _prices(self, shape: tuple[int, ...], dtype: torch.dtype, sources: Sequence[Spec], targets: Sequence[Spec], inner: bool,
                others: Together | None) -> np.ndarray:
        solved = self._solve(shape, dtype, _partials(sources), inner, self._idle((*sources, *targets)))
        rows = [solved.layout.index.get(s, -1) for s in sources]
        cols = [solved.layout.index.get(t, -1) for t in targets]
        pairs = np.ix_(rows, cols)
        keys = solved.keys[pairs]
        out = np.where(keys < UNREACHABLE, self._along(solved, others)[pairs] if others is not None else (keys >> HOP_BITS) * solved.unit, np.inf)
        out[[i for i, r in enumerate(rows) if r < 0]] = np.inf
        out[:, [j for j, c in enumerate(cols) if c < 0]] = np.inf
        where = {t: j for j, t in enumerate(targets)}
        for i, s in enumerate(sources):
            if s in where:
                out[i, [j for j, t in enumerate(targets) if t == s]] = 0.0
        return out

    def seconds(self, shape: tuple[int, ...], dtype: torch.dtype, src: Spec, dst: Spec) -> float:
        """One entry of `table`."""
        return float(self.table(shape, dtype, (src,), (dst,))[0, 0])

    def steps(self, shape: tuple[int, ...], dtype: torch.dtype, src: Spec, dst: Spec) -> tuple[Step, ...]:
        """The cheapest sequence from `src` to `dst`; among equals the shortest, then the first in the order of
        (kind, axes, target dim). Empty when they are equal. Raises LoweringError when there is none."""
        key = (shape, dtype, src, dst)
        if key not in self._steps:
            self._steps[key] = () if src == dst else self._read_path(shape, dtype, src, dst)
        return self._steps[key]

    def _read_path(self, shape: tuple[int, ...], dtype: torch.dtype, src: Spec, dst: Spec) -> tuple[Step, ...]:
        solved = self._solve(shape, dtype, _partials((src,)), any(map(is_inner, (*src, *dst))), self._idle((src, dst)))
        lay = solved.layout
        at, end = lay.index.get(src, -1), lay.index.get(dst, -1)
        if min(at, end) < 0 or solved.keys[at, end] >= UNREACHABLE:
            raise LoweringError(f"no way to redistribute a {dtype} tensor of logical shape {list(shape)} from "
                                f"{format_spec(src)} to {format_spec(dst)} on mesh {self.mesh}")
        out = []
        while at != end:
            rows = np.flatnonzero(lay.src == at)
            exact = solved.move_keys[rows] + solved.keys[lay.dst[rows], end] == solved.keys[at, end]
            row = int(rows[np.argmax(exact)])
            out.append(self._step(solved, row))
            at = int(lay.dst[row])
        return tuple(out)

    def shared(self, step: Step, others: Together) -> float:
        """Seconds of a step of a gradient's way."""
        if step.kind == SLICE:
            return step.seconds
        key = (step.kind, step.axes, step.nbytes, others)
        if key not in self._savings:
            own, share = (share_seconds(step.kind, step.nbytes, who, self.links[step.axes], self.cluster.device) for who in (None, others))
            self._savings[key] = own - share
        return step.seconds - self._savings[key]

    def _along(self, solved: _Solved, others: Together) -> np.ndarray:
        """Seconds [state, state] of the ways of a gradient, which are those without shares: programs are made from specs alone."""
        if (id(solved), others) not in self._ways:
            rows = range(len(solved.layout.moves))
            self._ways[id(solved), others] = _summed(solved, np.array([self.shared(self._step(solved, row), others) for row in rows]))
        return self._ways[id(solved), others]

    @staticmethod
    def _step(solved: _Solved, row: int) -> Step:
        move = solved.layout.moves[row]
        before = solved.layout.states[move.src][move.axes[0]]
        return Step(move.kind, move.axes, move.src_dim, move.dst_dim, REDUCE_OPS.get(before, ""),
                    int(solved.nbytes[row]), int(solved.rearranged[row]), float(solved.seconds[row]),
                    solved.layout.states[move.dst])

    def _idle(self, specs: Sequence[Spec]) -> tuple[int, ...]:
        """Axes of one rank on which all of these are Replicate: no cheapest sequence moves there."""
        return tuple(a for a, size in enumerate(self.mesh.sizes) if size == 1 and all(s[a] == R for s in specs))

    def _solve(self, shape: tuple[int, ...], dtype: torch.dtype, partials: tuple[int, ...], inner: bool, idle: tuple[int, ...]) -> _Solved:
        if not dtype.is_floating_point and not dtype.is_complex:
            partials = ()
        key = (shape, dtype, partials, inner, idle)
        if key not in self._solved:
            self._solved[key] = self._all_pairs(layout(len(shape), self.mesh.sizes, partials, inner, idle), shape, dtype)
        return self._solved[key]

    def _all_pairs(self, lay: StateGraph, shape: tuple[int, ...], dtype: torch.dtype) -> _Solved:
        full = np.array(shape, np.int64)
        valid = np.all((full % lay.cuts == 0) & ((full >= lay.cuts) | (lay.cuts == 1)), axis=1)  # a dim of size 0 is never cut
        nbytes, rearranged, seconds = self._price(lay, full // lay.cuts, dtype.itemsize)
        legal = valid[lay.src] & valid[lay.dst]
        # Integer prices make sums exact; 2^-50 of the dearest step is far below the 1e-9 that matters.
        unit = max(float(seconds[legal].max(initial=0.0)), 1e-12) * 2.0 ** -50
        move_keys = np.where(legal, (np.rint(np.where(legal, seconds, 0) / unit).astype(np.int64) << HOP_BITS) + 1,
                             UNREACHABLE)
        keys = np.full((len(lay.states),) * 2, UNREACHABLE)
        keys[lay.src, lay.dst] = move_keys
        np.fill_diagonal(keys, 0)
        for k in np.flatnonzero(valid):
            np.minimum(keys, keys[:, k, None] + keys[k], out=keys)
        return _Solved(lay, keys, move_keys, nbytes, rearranged, seconds, unit)

    def _price(self, lay: StateGraph, local: np.ndarray, itemsize: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """nbytes, rearranged bytes and seconds of every move, from the local shapes [state, dim]."""
        held = local.prod(axis=1) * itemsize
        before = np.cumprod(np.concatenate([np.ones((len(local), 1), np.int64), local], axis=1), axis=1)
        nbytes, rearranged = held[lay.src], np.zeros(len(lay.moves), np.int64)
        seconds = np.zeros(len(lay.moves))
        for kind, axes, src_dim, dst_dim, rows in lay.groups:
            a, b = lay.src[rows], lay.dst[rows]
            if kind == SLICE:
                nbytes[rows] = 0
                continue
            nbytes[rows] = collectives.KINDS[kind].buffer(held[a], held[b])
            if self.mesh.ranks(axes) == 1:  # one piece is in order already
                continue
            if src_dim >= 0:
                rearranged[rows] += np.where(before[b, src_dim] > 1, held[b], 0)
            if dst_dim >= 0:
                rearranged[rows] += np.where(before[a, dst_dim] > 1, held[a], 0)
            seconds[rows] = collectives.seconds(kind, nbytes[rows], self.links[axes])
        copied = rearranged > 0
        seconds[copied] += op_seconds(Family.COPY, 0, 2 * rearranged[copied], torch.uint8, self.cluster.device)
        return nbytes, rearranged, seconds


def _summed(solved: _Solved, seconds: np.ndarray) -> np.ndarray:
    """Sums of `seconds` [move] over the moves that `steps` reads back, [state, state]; 0 where there is no way."""
    lay, n = solved.layout, len(solved.layout.states)
    first = np.zeros((n, n), np.int64)
    for s in range(n):
        rows = np.flatnonzero(lay.src == s)
        if len(rows):
            first[s] = rows[np.argmax(solved.move_keys[rows][:, None] + solved.keys[lay.dst[rows]] == solved.keys[s], axis=0)]
    out = np.zeros((n, n))
    hops = np.where(solved.keys < UNREACHABLE, solved.keys & ((1 << HOP_BITS) - 1), 0)
    for k in range(1, int(hops.max(initial=0)) + 1):
        s, t = np.nonzero(hops == k)
        out[s, t] = seconds[first[s, t]] + out[lay.dst[first[s, t]], t]
    return out


def step_seconds(kind: str, nbytes: int, rearranged: int, link: AxisLink, cluster: Cluster) -> float:
    """Price of one executed step from what an observer sees; equals `Step.seconds`."""
    if kind == SLICE:
        return 0.0
    copy = op_seconds(Family.COPY, 0, 2 * rearranged, torch.uint8, cluster.device) if rearranged else 0.0
    return collectives.seconds(kind, nbytes, link) + copy


def _partials(specs: Sequence[Spec]) -> tuple[int, ...]:
    return tuple(sorted({p for s in specs for p in s if is_partial(p)}, reverse=True))
