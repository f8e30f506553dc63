"""Placements and sharding specs: how one tensor lies on the mesh.

Inside tables a *placement* on one mesh axis is a small int, so a strategy is a row of an int array:

    d >= 0     Shard(d): logical dim d is split over the axis
    R  = -1    Replicate
    PSUM = -2  Partial(sum);  PMAX = -3, PMIN = -4 likewise
    NOWHERE    no value at all; only while recomputation is undecided (recompute/undecided.py)
    d + INNER  Shard(d) inside of the later axes that split d; only of what is stored, and of its gradients

A *spec* is a tuple of placements, one per mesh axis in mesh order. Where several axes split the same dim, they nest in mesh order, the
first major, but for inner ones: these come after the others. On a mesh (dp, tp) a weight that is `(INNER, 0)` is cut into tp's pieces, and
each of these into dp's, so that gathering dp leaves tp's pieces; torch writes `(_StridedShard(0, split_factor=tp), Shard(0))`. The last axis of
a dim is never an inner one, so every layout has one spec. `ShardingSpec` is the form users see (axis names per dim, major first).

Dims are **logical** dims: a tensor dim that a view made by flattening keeps its factors (see
`TensorMeta`), so that a sharded sequence survives `[batch, seq, d] -> [batch*seq, d]`.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product

from autoshard.base.graph import TensorMeta
from autoshard.base.mesh import Mesh
from autoshard.errors import MeshError, UsageError

Placement = int
Spec = tuple[Placement, ...]

R: Placement = -1
PSUM: Placement = -2
PMAX: Placement = -3
PMIN: Placement = -4
NOWHERE: Placement = 127
"""Of a value that is not there: a strategy with it does not read that input, or does not make that output."""
INNER: Placement = 64
REDUCE_OPS = {PSUM: "sum", PMAX: "max", PMIN: "min"}


def is_shard(p: Placement) -> bool:
    return 0 <= p < NOWHERE


def is_partial(p: Placement) -> bool:
    return p <= PSUM


def split_by(p: Placement) -> Placement:
    """The dim that a shard splits, inner or not; other placements as they are."""
    return p - INNER if INNER <= p < NOWHERE else p


def is_inner(p: Placement) -> bool:
    return INNER <= p < NOWHERE


def nesting(spec: Spec, dim: int) -> tuple[int, ...]:
    """The mesh axes that split `dim`, major first."""
    return (*(a for a, p in enumerate(spec) if p == dim), *(a for a, p in enumerate(spec) if p == dim + INNER))


def nested(dim: int, axes: Sequence[int]) -> dict[int, Placement] | None:
    """The placement of each of `axes` where they split `dim` in this order, major first; None where no spec says so. Inverse of `nesting`."""
    for cut in range(len(axes), 0, -1):
        outer, inner = axes[:cut], axes[cut:]
        if list(outer) == sorted(outer) and list(inner) == sorted(inner) and all(a < outer[-1] for a in inner):
            return {**dict.fromkeys(outer, dim), **dict.fromkeys(inner, dim + INNER)}
    return {} if not axes else None


def is_one_nesting(spec: Spec) -> bool:
    """Whether every inner shard is inside of a later axis, as specs of plans have them."""
    return all(is_inner(p) <= (p - INNER in spec[a + 1:]) for a, p in enumerate(spec))


def nestings(spec: Spec, sizes: tuple[int, ...]) -> Iterator[Spec]:
    """The specs that split the same dims over the same axes as `spec`, which has no inner shards, in other nestings; axes of one rank do not nest."""
    ways: list[list[tuple[int, ...]]] = []
    for dim in sorted({p for p in spec if p >= 0}):
        wide = [a for a in nesting(spec, dim) if sizes[a] > 1]
        ways.append([c for k in range(len(wide)) for c in combinations(wide[:-1], k)])
    for inner in product(*ways):
        axes = {a for c in inner for a in c}
        if axes:
            yield tuple(p + INNER if a in axes else p for a, p in enumerate(spec))


@cache
def format_placement(p: Placement) -> str:
    return f"I{p - INNER}" if is_inner(p) else f"S{p}" if p >= 0 else "R" if p == R else "P" if p == PSUM else f"P{REDUCE_OPS[p]}"


def format_spec(spec: Spec) -> str:
    """`(0, -1)` -> `"S0,R"`: one placement per mesh axis; `"I0"` is an inner shard."""
    return ",".join(format_placement(p) for p in spec)


def parse_spec(text: str) -> Spec:
    """Inverse of `format_spec`. Raises UsageError."""
    names = {"R": R, "P": PSUM, "Psum": PSUM, "Pmax": PMAX, "Pmin": PMIN}
    out = []
    for part in (p.strip() for p in text.split(",")):
        if part in names:
            out.append(names[part])
        elif part[:1] in ("S", "I") and part[1:].strip("()").isdigit():
            out.append(int(part[1:].strip("()")) + (INNER if part[0] == "I" else 0))
        else:
            raise UsageError(f"cannot read placement {part!r} in {text!r}; write R, S0, S1 ... or P per mesh axis")
    return tuple(out)


def replicated(mesh: Mesh) -> Spec:
    return (R,) * mesh.ndim


def shard_counts(ndim: int, spec: Spec, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """How many pieces each of `ndim` logical dims is cut into under `spec` on axes of `sizes`."""
    counts = [1] * ndim
    for placement, size in zip(spec, sizes, strict=True):
        if placement >= 0:
            counts[split_by(placement)] *= size
    return tuple(counts)


def divides(shape: tuple[int, ...], spec: Spec, sizes: tuple[int, ...]) -> bool:
    """Whether every sharded logical dim of `shape` splits evenly."""
    if any(split_by(p) >= len(shape) for p in spec):
        return False
    return all(n % c == 0 and n >= c for n, c in zip(shape, shard_counts(len(shape), spec, sizes), strict=True)
               if c > 1)


def stores(meta: TensorMeta, spec: Spec, sizes: tuple[int, ...]) -> bool:
    """Whether a tensor may be stored so: its dims split evenly, and the pieces of a padded one are those that DTensor makes of its true
    length, ceil(n / k) each with the rest on the last ranks, so that the pad is where they end."""
    if not divides(meta.logical_shape, spec, sizes):
        return False
    for d, (n, true) in enumerate(zip(meta.shape, meta.true_shape, strict=True)):
        here = [size for p, size in zip(spec, sizes, strict=True) if size > 1 and split_by(p) in meta.logical_dims(d)]
        if n != true and here and (len(here) > 1 or n != here[0] * -(-true // here[0])):
            return False
    return True


def beside(meta: TensorMeta, other: TensorMeta, spec: Spec) -> Spec | None:
    """`spec` of the tensor `meta` in dims that it shares with `other`, of equal shape. A view may have merged dims of one of them (its factors say
    so): then blocks of tensor dims count, and what is none is None."""
    return spec if meta.factors == other.factors else meta.on_tensor_dims(spec)


def lie_alike(one: TensorMeta, two: TensorMeta, a: Spec, b: Spec) -> bool:
    """Whether a rank's piece of the tensor `one` as `a` says is that of `two`, of equal shape, as `b` says."""
    here = beside(one, two, a)
    return here is not None and here == beside(two, one, b)


def may_be_stored(meta: TensorMeta, spec: Spec, mesh: Mesh) -> bool:
    """Whether users may hold a tensor so: the axes of their mesh say the placement, and its pieces are DTensor's."""
    whole = mesh.as_whole(spec)
    return whole is not None and stores(meta, whole, mesh.whole.sizes)


def local_shape(shape: tuple[int, ...], spec: Spec, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Logical shape on one rank. Partial and Replicate keep the shape."""
    return tuple(n // c for n, c in zip(shape, shard_counts(len(shape), spec, sizes), strict=True))


def local_tensor_shape(meta: TensorMeta, spec: Spec, mesh: Mesh) -> tuple[int, ...]:
    """Shape of the tensor a rank holds, flattened dims flattened."""
    return meta.unflatten(local_shape(meta.logical_shape, spec, mesh.sizes))


def shard_offset(dim: int, spec: Spec, sizes: tuple[int, ...], coordinates: tuple[int, ...]) -> int:
    """Which piece of `dim` a rank holds: the axes that split it are digits, major first."""
    index = 0
    for a in nesting(spec, dim):
        index = index * sizes[a] + coordinates[a]
    return index


@dataclass(frozen=True)
class ShardingSpec:
    """The users' form: per tensor dim the axes that split it (major first), and Partial axes.

    >>> ShardingSpec((("dp",), ()), (("tp", "sum"),))
    """

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[tuple[str, str], ...] = ()

    def to_spec(self, mesh: Mesh) -> Spec:
        """Placements per mesh axis. Raises MeshError for unknown axes or a nesting that no spec has."""
        out = [R] * mesh.ndim
        for dim, axes in enumerate(self.dims):
            order = [i for a in axes for i in mesh.named(a)]
            for i in order:
                if out[i] != R or order.count(i) > 1:
                    raise MeshError(f"mesh axis {mesh.names[i]!r} splits two dims of one tensor")
            placed = nested(dim, order)
            if placed is None:
                raise MeshError(f"dim {dim} is split over {axes}; of a mesh {mesh} axes nest in its order, or some of them, in its order, come after "
                                "the others")
            for i, p in placed.items():
                out[i] = p
        codes = {v: k for k, v in REDUCE_OPS.items()}
        for axis, op in self.partial:
            for i in mesh.named(axis):
                out[i] = codes[op]
        return tuple(out)

    @staticmethod
    def from_spec(spec: Spec, ndim: int, mesh: Mesh) -> "ShardingSpec":
        dims = tuple(mesh.shown(nesting(spec, d)) for d in range(ndim))
        kinds = dict.fromkeys(p for p in spec if is_partial(p))
        partial = tuple((axis, REDUCE_OPS[p]) for p in kinds for axis in mesh.shown([i for i, q in enumerate(spec) if q == p]))
        return ShardingSpec(dims, partial)

    def __str__(self) -> str:
        body = ", ".join("-" if not a else a[0] if len(a) == 1 else "(" + "*".join(a) + ")" for a in self.dims)
        tail = "".join(f" partial {op} over {axis}" for axis, op in self.partial)
        return f"[{body}]{tail}"
