"""Finds values that equal a parameter or a gradient up to views and casts: their communication can overlap compute."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import wraps
from typing import TypeVar

import torch

from autoshard.base.graph import Graph, Op, Ref
from autoshard.base.roles import Role
from autoshard.base.spec import PSUM
from autoshard.base.windows import is_accumulator, is_hold
from autoshard.rules import registry
from autoshard.rules.types import Row

PART = Row((PSUM,), (PSUM,))
"""A part of a sum stays one."""


T = TypeVar("T")


def once(find: Callable[[Graph], T]) -> Callable[[Graph], T]:
    """`find`, asked once of each graph: phases share what it answers, and must not change it."""
    @wraps(find)
    def known(graph: Graph) -> T:
        if find.__qualname__ not in graph.facts:
            graph.facts[find.__qualname__] = find(graph)
        return graph.facts[find.__qualname__]

    return known


def is_passing(op: Op) -> bool:
    """A view or cast of a single tensor, or its sum over micro-batches: the value stays the same parameter or gradient."""
    return (registry.is_view(op) or registry.is_cast(op) or is_accumulator(op)) and len(op.refs) - len(op.kept) == 1


def passed_on(graph: Graph, ref: Ref) -> list[Ref]:
    """A value and what views and casts make it of, to the first."""
    out = [ref]
    while graph.op(out[-1].op).kind == "call" and is_passing(graph.op(out[-1].op)):
        out.append(graph.op(out[-1].op).refs[0])
    return out


@once
def param_derived(graph: Graph) -> frozenset[Ref]:
    """Parameters and what views and casts make of them alone: their gathers may be issued early."""
    out: set[Ref] = set()
    for op in graph.ops:
        if op.kind == "param" or (is_passing(op) and op.refs[0] in out):
            out.add(Ref(op.name))
    return frozenset(out)


@once
def laid_as_stored(graph: Graph) -> frozenset[str]:
    """Parameters, outputs of gradients, and casts, sums over micro-batches and what is held for a step between these and the first op
    that computes or looks at a dim: what may lie in any nesting in which a parameter is stored."""
    after = {op.name for op in graph.of_kind("param")}
    before = {op.name for op in graph.outputs(Role.GRADIENT).values()}
    for op in graph.ops:
        if _is_alike(op) and op.refs[0].op in after:
            after.add(op.name)
    for op in reversed(graph.ops):
        readers = graph.users.get(Ref(op.name), ())
        if _is_alike(op) and readers and all(name in before for name, _ in readers):
            before.add(op.name)
    return frozenset(after | before)


def _is_alike(op: Op) -> bool:
    """A call that makes of each element of one tensor one of its result."""
    return registry.is_cast(op) or is_accumulator(op) or is_hold(op)


@once
def narrowed(graph: Graph) -> frozenset[Ref]:
    """Parameters that are read through casts to a narrower dtype alone: who gathers them does it behind the cast."""
    return frozenset(ref for op in graph.of_kind("param") if (readers := graph.users.get(ref := Ref(op.name), ())) and all(
        _narrows(graph.op(name), graph.meta(ref).dtype) for name, _ in readers))


def _narrows(op: Op, dtype: torch.dtype) -> bool:
    return is_passing(op) and op.outputs[0].dtype.itemsize < dtype.itemsize


@once
def gradient_bound(graph: Graph) -> frozenset[Ref]:
    """Values that only flow, through views and casts, into gradient outputs: reductions may finish late."""
    out: set[Ref] = set()
    ends = {op.name for op in graph.outputs(Role.GRADIENT).values()}
    for op in reversed(graph.ops):
        for i in range(len(op.outputs)):
            users = graph.users.get(Ref(op.name, i), ())
            if users and all(u in ends or (Ref(u) in out and is_passing(graph.op(u))) for u, _ in users):
                out.add(Ref(op.name, i))
    return frozenset(out)


def gradients_at_once(graph: Graph) -> Graph:
    """The graph in which views and casts on the way to a gradient output follow what they read. autograd runs the casts of a
    precision policy when backward is through, and as their sums over ranks come after them, no gradient would be reduced
    before: all would lie there whole."""
    bound, waiting = gradient_bound(graph), defaultdict(list)
    ops: list[Op] = []
    for op in graph.ops:
        if is_passing(op) and Ref(op.name) in bound and graph.op(op.refs[0].op).phase == op.phase:
            waiting[op.refs[0].op].append(op)
    for op in (op for op in graph.ops if op not in waiting[op.refs[0].op if op.refs else ""]):
        todo = [op]
        while todo:
            ops.append(todo.pop())
            todo += reversed(waiting[ops[-1].name])
    return replace(graph, ops=tuple(ops)) if any(a is not b for a, b in zip(ops, graph.ops, strict=True)) else graph


@once
def reduction_dtypes(graph: Graph) -> Mapping[Ref, torch.dtype]:
    """Under a precision policy: per gradient-bound value, the dtype its sum over ranks must be taken in. Gradients that are never in
    that dtype (those of batch norms, which stay in the stored one) are left out: they are summed as they are."""
    wanted: dict[Ref, torch.dtype] = {}
    for op in reversed(graph.ops):
        dtype = dict(op.kwargs).get("reduce") if op.kind == "output" else wanted.get(Ref(op.name)) if is_passing(op) else None
        if dtype is not None:
            wanted[op.refs[0]] = dtype
    bound = gradient_bound(graph)
    wanted = {ref: dtype for ref, dtype in wanted.items() if ref in bound}
    before, later = _met_before(graph, wanted), _met_later(graph, wanted)
    return {ref: dtype for ref, dtype in wanted.items() if ref in before or ref in later}


def _met_before(graph: Graph, wanted: Mapping[Ref, torch.dtype]) -> set[Ref]:
    """Values that are in the dtype wanted of them, or were before they got here."""
    out: set[Ref] = set()
    for op in graph.ops:
        for ref in (Ref(op.name, i) for i in range(len(op.outputs))):
            if ref in wanted and (graph.meta(ref).dtype == wanted[ref] or is_passing(op) and op.refs[0] in out):
                out.add(ref)
    return out


def _met_later(graph: Graph, wanted: Mapping[Ref, torch.dtype]) -> set[Ref]:
    """Values that are in the dtype wanted of them on every way to a gradient output."""
    out: set[Ref] = set()
    for op in reversed(graph.ops):
        for ref in (Ref(op.name, i) for i in range(len(op.outputs))):
            if ref in wanted and (graph.meta(ref).dtype == wanted[ref] or all(Ref(u) in out for u, _ in graph.users[ref])):
                out.add(ref)
    return out


@once
def casts_of_parts(graph: Graph) -> frozenset[str]:
    """Casts that make a gradient as narrow as a precision policy wants it summed over ranks: each rank rounds its own part, and the
    sum comes after. Elsewhere parts of a sum must not be rounded."""
    wanted = reduction_dtypes(graph)
    return frozenset(r.op for r, dtype in wanted.items()
                     if is_passing(op := graph.op(r.op)) and op.refs[0] in wanted and graph.meta(r).dtype == dtype
                     and _narrows(op, graph.meta(op.refs[0]).dtype))


def rows_of(graph: Graph, op: Op, of_parts: Collection[str]) -> tuple[Row, ...]:
    """Every way to run a call over one mesh axis: its rule's, and Partial to Partial for one of `of_parts` (`casts_of_parts`)."""
    rows = registry.rows(graph.calls[op.name])
    return (*rows, PART) if op.name in of_parts and PART not in rows else rows


@once
def casts_after_sums(graph: Graph) -> frozenset[str]:
    """Casts of gradients that a precision policy wants summed over ranks before, in the dtype they are made in."""
    wanted = reduction_dtypes(graph)
    return frozenset(r.op for r, dtype in wanted.items()
                     if is_passing(op := graph.op(r.op)) and op.refs[0] in wanted
                     and graph.meta(op.refs[0]).dtype == dtype != graph.meta(r).dtype)
