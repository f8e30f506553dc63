"""The numeric oracle: is a row true? Shard real inputs by it, run the op on every shard, put the outputs
together, compare with the op on whole tensors. And the other way round: which rows does a rule lack?

Ranks are threads, so that local implementations may all-reduce. Partial inputs are random parts that
combine to the tensor (equal parts would let nonlinear ops pass), and shapes are compared before values.
"""
from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Any

import torch

from autoshard.base.graph import Call, Slot, TensorMeta
from autoshard.base.mesh import Mesh
from autoshard.base.spec import PMAX, PSUM, REDUCE_OPS, Placement, R, Spec, divides, local_shape, shard_offset
from autoshard.collectives.all_to_all_rows import reference as rows_reference
from autoshard.collectives.exchange import Exchange
from autoshard.collectives.reduce_ops import COMBINE
from autoshard.rules import registry
from autoshard.rules.notation import is_number
from autoshard.rules.types import LocalContext, Row

_PATIENCE_S = 20.0


@dataclass(frozen=True)
class Wrong:
    """A row that fails, and why. `rows` has one row per mesh axis."""

    call: Call
    rows: tuple[Row, ...]
    why: str

    def __str__(self) -> str:
        return f"{self.call.target}{tuple(m.shape for m in self.call.inputs)} {self.rows}: {self.why}"


# ---- pieces of tensors

def split(x: torch.Tensor, meta: TensorMeta, spec: Spec, mesh: Mesh, rng: torch.Generator,
          strided: bool = False) -> list[torch.Tensor]:
    """The local tensor of every rank, contiguous or with its dims stored in another order. Partial axes get random parts."""
    pieces = [x.reshape(meta.logical_shape)]
    for placement, n in zip(spec, mesh.sizes, strict=True):
        pieces = [part for piece in pieces for part in _cut(piece, placement, n, rng)]
    local = [p.reshape(meta.unflatten(tuple(p.shape))).contiguous() for p in pieces]
    return [_reordered(p) for p in local] if strided else local


def _reordered(x: torch.Tensor) -> torch.Tensor:
    """Equal to `x`, its dims stored in reverse order but for the last, which stays innermost: the lowering promises that."""
    order = [*reversed(range(x.ndim - 1)), x.ndim - 1] if x.ndim else []
    return x.permute(order).contiguous().permute(order)


def _cut(x: torch.Tensor, placement: Placement, n: int, rng: torch.Generator) -> list[torch.Tensor]:
    if placement >= 0:
        return list(x.chunk(n, placement))
    if placement == R:
        return [x] * n
    noise = torch.rand((n, *x.shape), generator=rng, dtype=torch.float64).to(x)
    if placement == PSUM:
        return [*noise[1:], x - noise[1:].sum(0)]
    holder = torch.randint(n, x.shape, generator=rng).to(x.device)
    sign = -1 if placement == PMAX else 1
    return [torch.where(holder == i, x, x + sign * noise[i]) for i in range(n)]


def join(pieces: Sequence[torch.Tensor], meta: TensorMeta, spec: Spec, mesh: Mesh,
         tolerance: float = 1e-9) -> torch.Tensor | str:
    """Inverse of `split`, or what is wrong with the pieces."""
    wanted = local_shape(meta.logical_shape, spec, mesh.sizes)
    for p in pieces:
        if tuple(p.shape) != meta.unflatten(wanted):
            return f"a local output has shape {tuple(p.shape)}, not {meta.unflatten(wanted)}"
    parts = [p.reshape(wanted) for p in pieces]
    for placement, n in zip(reversed(spec), reversed(mesh.sizes), strict=True):
        groups = [parts[i:i + n] for i in range(0, len(parts), n)]
        if placement == R and not all(_close(g[0], p, tolerance) for g in groups for p in g[1:]):
            return "ranks disagree about a replicated output"
        parts = [_merge(g, placement) for g in groups]
    return parts[0].reshape(meta.shape)


def _merge(group: Sequence[torch.Tensor], placement: Placement) -> torch.Tensor:
    if placement >= 0:
        return torch.cat(list(group), placement)
    out = group[0]
    for p in group[1:] if placement != R else ():
        out = COMBINE[REDUCE_OPS[placement]](out, p)
    return out


def _close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-9, scale: torch.Tensor | None = None) -> bool:
    """Whether |a - b| <= tolerance (1 + |scale|) everywhere; `scale` is b where it is not given."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.to(torch.complex128), b.to(torch.complex128)
    near = torch.isclose(a, b, tolerance, tolerance, equal_nan=True)
    if scale is not None:
        near |= (a - b).abs() <= tolerance * (1 + scale.abs().double())
    return bool(near.all())


# ---- running one op on threads

class _Exchange:
    """Collectives between threads."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.barrier = threading.Barrier(mesh.size)
        self.held: dict[int, Any] = {}

    def all_reduce(self, rank: int, x: torch.Tensor, reduce_op: str, axis: int) -> torch.Tensor:
        out: torch.Tensor = reduce(COMBINE[reduce_op], self.gathered(rank, x, axis)[1])
        return out

    def mirror(self, rank: int, x: torch.Tensor, axis: int) -> torch.Tensor:
        me, found = self.gathered(rank, x, axis)
        out: torch.Tensor = found[-1 - me]
        return out

    def gathered(self, rank: int, x: Any, axis: int) -> tuple[int, list[Any]]:
        """Which of the ranks along `axis` this one is, and what they have, in their order."""
        self.held[rank] = x
        self.barrier.wait(_PATIENCE_S)
        mine = self.mesh.coordinates(rank)
        group = [other for other in range(self.mesh.size)
                 if all(a == b for i, (a, b) in enumerate(zip(self.mesh.coordinates(other), mine, strict=True)) if i != axis)]
        found = [self.held[other] for other in group]
        self.barrier.wait(_PATIENCE_S)
        return group.index(rank), found


@dataclass(frozen=True, eq=False)
class ThreadContext(LocalContext):
    """Of one thread."""

    rank: int
    exchange: _Exchange

    def index(self, axes: Sequence[int]) -> int:
        chosen = tuple(0 if i in axes else R for i in range(self.mesh.ndim))
        return shard_offset(0, chosen, self.mesh.sizes, self.mesh.coordinates(self.rank))

    def all_reduce(self, x: torch.Tensor, reduce_op: str, axes: Sequence[int]) -> torch.Tensor:
        for axis in sorted(axes, reverse=True):
            x = self.exchange.all_reduce(self.rank, x, reduce_op, axis)
        return x

    def mirror(self, x: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
        for axis in sorted(axes, reverse=True):
            x = self.exchange.mirror(self.rank, x, axis)
        return x

    def all_to_all(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        me, found = self.exchange.gathered(self.rank, x, axis)
        return Exchange.TRANSPOSE.reference(found, "")[me]

    def all_to_all_rows(self, x: torch.Tensor, sends: torch.Tensor, gets: torch.Tensor, room: int, balanced: int, axis: int) -> torch.Tensor:
        me, found = self.exchange.gathered(self.rank, (x, sends, gets), axis)
        xs, sent, got = zip(*found, strict=True)
        return rows_reference(xs, sent, got, room)[me]


def run_whole(call: Call, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """The op on whole tensors; always a tuple of outputs."""
    args, kwargs = _arguments(call, tensors)
    return _outputs(call.target(*args, **kwargs))


def run_sharded(call: Call, tensors: Sequence[torch.Tensor], inputs: tuple[Spec, ...], outputs: tuple[Spec, ...],
                mesh: Mesh, rng: torch.Generator, strided: bool = False) -> list[tuple[Any, ...]]:
    """Outputs of every rank. Raises whatever the op raises on its local tensors."""
    pieces = [split(x, m, s, mesh, rng, strided) for x, m, s in zip(tensors, call.inputs, inputs, strict=True)]
    return run_pieces(call, pieces, inputs, outputs, mesh)


def run_pieces(call: Call, pieces: Sequence[Sequence[torch.Tensor]], inputs: tuple[Spec, ...], outputs: tuple[Spec, ...],
               mesh: Mesh) -> list[tuple[Any, ...]]:
    """`run_sharded` on inputs that are in pieces already: of each input those of all ranks."""
    exchange = _Exchange(mesh)

    def run(rank: int) -> tuple[Any, ...]:
        ctx = ThreadContext(call, inputs, outputs, mesh, rank, exchange)
        args, kwargs = _arguments(call, [p[rank] for p in pieces])
        try:
            return _outputs(registry.run_local(ctx, *args, **kwargs))
        except BaseException:
            exchange.barrier.abort()
            raise

    with ThreadPoolExecutor(mesh.size) as pool:
        futures = [pool.submit(run, rank) for rank in range(mesh.size)]
    errors = [e for f in futures if (e := f.exception())]
    for e in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise e
    return [f.result() for f in futures]


def _arguments(call: Call, tensors: Sequence[torch.Tensor]) -> tuple[Any, dict[str, Any]]:
    def fill(leaf: Any) -> Any:
        return tensors[leaf.index] if isinstance(leaf, Slot) else leaf

    def listed(value: Any) -> Any:
        return [listed(v) for v in value] if isinstance(value, tuple) else fill(value)

    return tuple(listed(a) for a in call.args), {k: listed(v) for k, v in call.kwargs}


def _outputs(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


# ---- verdicts

def _tolerance(call: Call) -> float:
    """Of the least precise float in or out: the parts of a Partial round in their own dtype."""
    dtypes = [m.dtype for m in (*call.inputs, *call.outputs) if m is not None and is_number(m.dtype)]
    return max([1e-9, *(100 * torch.finfo(t).eps for t in dtypes)])


def check_rows(call: Call, tensors: Sequence[torch.Tensor], rows: Sequence[Row], sizes: tuple[int, ...] = (2,),
               values: bool = True, strided: bool = False) -> Wrong | None:
    """Test one strategy: one row per mesh axis of `sizes`. None when it is right, or does not divide.

    values=False compares shapes only (for ops that leave memory unset); strided=True gives the ranks pieces that
    are not contiguous."""
    mesh = Mesh(tuple(f"d{i}" for i in range(len(sizes))), sizes)
    ins = tuple(zip(*(row.inputs for row in rows), strict=True)) if call.inputs else ()
    outs = tuple(zip(*(row.outputs for row in rows), strict=True))
    metas = (*zip(call.inputs, ins, strict=True), *zip(call.outputs, outs, strict=True))
    if not all(m is None or divides(m.logical_shape, s, sizes) for m, s in metas) or not registry.takes_pieces(call, ins, sizes):
        return None
    if strided and not _takes_strided(call, tensors):
        return None
    try:
        found = run_sharded(call, tensors, ins, outs, mesh, torch.Generator().manual_seed(1), strided)
    except Exception as e:  # whatever the op raises on its shards is the verdict
        return Wrong(call, tuple(rows), f"{type(e).__name__}: {e}")
    private = registry.rule_of(call.target).private
    for i, (meta, whole) in enumerate(zip(call.outputs, run_whole(call, tensors), strict=True)):
        parts = [f[i] for f in found]
        if meta is not None and i not in private and (why := _compare(whole, parts, meta, outs[i], mesh, values, _tolerance(call))):
            return Wrong(call, tuple(rows), f"output {i}: {why}")
    return None


def _takes_strided(call: Call, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the op itself accepts tensors that are not contiguous."""
    try:
        run_whole(call, [_reordered(t) for t in tensors])
    except RuntimeError:
        return False
    return True


def _compare(whole: torch.Tensor, parts: Sequence[torch.Tensor], meta: TensorMeta, spec: Spec, mesh: Mesh,
             values: bool, tolerance: float) -> str:
    joined = join(parts if values else [torch.zeros_like(p) for p in parts], meta, spec, mesh, tolerance)
    if isinstance(joined, str):
        return joined
    if joined.dtype != whole.dtype:
        return f"dtype {joined.dtype}, not {whole.dtype}"
    scale: torch.Tensor | None = None
    if values and PSUM in spec:  # parts round by their own size, which may be far above that of their sum
        sizes = join([p.abs() for p in parts], meta, spec, mesh, float("inf"))
        if isinstance(sizes, str):
            return sizes
        scale = sizes
    return "values differ" if values and not _close(joined, whole, tolerance, scale) else ""


def wrong_rows(call: Call, tensors: Sequence[torch.Tensor], size: int = 2, pairs: int = 40,
               values: bool = True) -> list[Wrong]:
    """Every row of the call's rule on one axis of `size`, and up to `pairs` products of two rows on a
    2 x 2 mesh (evenly spread over all of them)."""
    rows = registry.rows(call)
    found = [check_rows(call, tensors, (row,), (size,), values) for row in rows]
    both = [(a, b) for a in rows for b in rows]
    step = max(1, len(both) // pairs)
    found += [check_rows(call, tensors, pair, (2, 2), values) for pair in both[::step]]
    return [w for w in found if w]


def missing_rows(call: Call, tensors: Sequence[torch.Tensor], size: int = 2, limit: int = 400) -> list[Row]:
    """Rows the oracle accepts and the rule lacks, among those with only Shards or only Partials for inputs.

    A row is not missing when one with the same inputs exists, or when all its inputs are whole (slicing the
    output afterwards is free). At most `limit` combinations of inputs are tried."""
    known = {row.inputs for row in registry.rows(call)}
    out = []
    for inputs in _candidates(call, limit):
        if inputs in known:
            continue
        for outputs in _answers(call, inputs):
            row = Row(inputs, outputs)
            if _even(call, row, size) and check_rows(call, tensors, (row,), (size,)) is None:
                out.append(row)
                break
    return out


def _candidates(call: Call, limit: int) -> Iterator[tuple[Placement, ...]]:
    shards = [(R, *(d for d, n in enumerate(m.logical_shape) if n > 1)) for m in call.inputs]
    partial = [(R, PSUM) if is_number(m.dtype) else (R,) for m in call.inputs]
    tried = 0
    for options in (shards, partial):
        for inputs in product(*options):
            if any(p != R for p in inputs) and tried < limit:
                tried += 1
                yield inputs


def _answers(call: Call, inputs: tuple[Placement, ...]) -> Iterator[tuple[Placement, ...]]:
    """Output placements worth trying: all outputs in one shard dim, or all Partial, or mixtures of two."""
    options: list[tuple[Placement, ...]] = []
    for m in call.outputs:
        if m is None:
            options.append((R,))
            continue
        partial = (PSUM,) if is_number(m.dtype) else ()
        options.append(((R,) if PSUM not in inputs else ()) + tuple(
            d for d, n in enumerate(m.logical_shape) if n > 1 and PSUM not in inputs) + partial)
    yield from (o for i, o in enumerate(product(*options)) if i < 64)


def _even(call: Call, row: Row, size: int) -> bool:
    metas = (*zip(call.inputs, row.inputs, strict=True), *zip(call.outputs, row.outputs, strict=True))
    return all(m is None or divides(m.logical_shape, (p,), (size,)) for m, p in metas)
