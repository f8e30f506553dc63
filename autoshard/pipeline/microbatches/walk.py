"""The programs of the batch and of a micro-batch side by side: which op is which, and the relation of every value (relations.py)."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import torch

from autoshard.base.checked import CHECKED
from autoshard.base.graph import Graph, Op, Ref, TensorMeta
from autoshard.pipeline.microbatches.relations import Added, Cut, Inexact, Pair, Relation, Same, relations_of

aten = torch.ops.aten


def partners(whole: Graph, part: Graph, accept: Callable[[Inexact], None]) -> dict[str, Op] | None:
    """The op of a micro-batch's program by the name of the same one of the batch's. Copies are left out: where a dim has size 1, some
    are views. None where the programs differ and that is accepted."""
    a, b = ([op for op in g.ops if op.phase == "forward" and not _is_copy(op)] for g in (whole, part))
    same: dict[Ref, Ref] = {}
    for one, other in zip(a, b, strict=False):
        read = tuple(same.get(_original(whole, r)) for r in one.refs)
        if (one.kind, _kind(one)) != (other.kind, _kind(other)) or read != tuple(_original(part, r) for r in other.refs):
            return accept(Inexact(one, f"there the program of a micro-batch goes on with {other.where}"))
        same.update((Ref(one.name, i), Ref(other.name, i)) for i in range(len(one.outputs)))
    if len(a) != len(b):
        longer = max(a, b, key=len)
        return accept(Inexact(longer[min(len(a), len(b))], "the batch and a micro-batch run programs of different lengths"))
    return {one.name: other for one, other in zip(a, b, strict=True)}


def _is_copy(op: Op) -> bool:
    return op.kind == "call" and op.target is aten.clone.default


def _original(graph: Graph, ref: Ref) -> Ref:
    while _is_copy(op := graph.op(ref.op)):
        (ref,) = op.refs
    return ref


def _kind(op: Op) -> str:
    return "reshape" if op.kind == "call" and op.target in RESHAPES else str(op.target)


RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def walk(whole: Graph, others: Mapping[str, Op], batch_dims: Sequence[int | None], pieces: int,
         accept: Callable[[Inexact], None]) -> dict[Ref, Relation]:
    """The relation of every value of forward; `others`: the ops of a micro-batch. `accept` is told of what is not exact, and may raise
    it; then the walk goes on with what shapes say."""
    found: dict[Ref, Relation] = {}
    dims, checks = iter(batch_dims), only_checked(whole)
    for op in whole.ops:
        if op.phase != "forward" or op.kind in ("output", "tangent"):
            continue
        if op.kind == "input":
            dim = next(dims)
            outputs: tuple[Relation, ...] = (Same() if dim is None else Cut(dim),)
        elif op.kind != "call":
            outputs = (Same(),)
        elif _is_copy(op) or op.target is CHECKED:
            outputs = (found[op.refs[0]],)
        elif op.name in checks:  # every micro-batch is checked by itself
            outputs = tuple(by_shape(m, n, pieces) for m, n in zip(op.outputs, others[op.name].outputs, strict=True))
        else:
            outputs = _of_call(Pair(op, others[op.name], whole, pieces, tuple(found[r] for r in op.refs)), accept)
        found.update((Ref(op.name, i), r) for i, r in enumerate(outputs))
    return found


def only_checked(graph: Graph) -> set[str]:
    """The ops whose values decide nothing but whether a check of the model holds."""
    other = {r.op for op in graph.ops for r in (op.refs[:1] if op.target is CHECKED else op.refs if op.kind == "output" else ())}
    for op in reversed(graph.ops):
        if op.kind == "call" and op.target is not CHECKED and op.name in other:
            other |= {r.op for r in op.refs}
    return {op.name for op in graph.of_kind("call")} - other


def _of_call(pair: Pair, accept: Callable[[Inexact], None]) -> tuple[Relation, ...]:
    try:
        return relations_of(pair)
    except Inexact as e:
        accept(e)
    return tuple(by_shape(m, n, pair.pieces) for m, n in zip(pair.whole.outputs, pair.part.outputs, strict=True))


def by_shape(whole: TensorMeta | None, part: TensorMeta | None, pieces: int) -> Relation:
    """A guess: what is longer is cut, numbers are means, the rest is the same."""
    if whole is None or part is None:
        return Same()
    longer = [d for d, (m, n) in enumerate(zip(whole.logical_shape, part.logical_shape, strict=False)) if m == pieces * n]
    if longer and whole.shape != part.shape:
        return Cut(longer[0])
    return Added(Fraction(1, pieces)) if whole.dtype.is_floating_point and not whole.shape else Same()
