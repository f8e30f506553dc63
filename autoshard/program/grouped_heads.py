"""Attention reads keys and values as they are made: not repeated for every head of the query.

Models written before torch's attention took grouped heads repeat each head of keys and values for all heads of the query that share it
(`repeat_interleave`, transformers' `repeat_kv`). The kernel that a trace calls takes fewer heads of keys, so the copies are left out, and so is
the sum over them in backward. What ranks would gather, keep and reduce shrinks by the same factor. Results are equal up to the order of a sum.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from autoshard.base.graph import Graph, Op, Ref

aten = torch.ops.aten
READS = {aten._scaled_dot_product_flash_attention_for_cpu.default: (1, 2), aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (2, 3)}
"""Positions of keys and values."""
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
HEADS, GROUP = 1, 2
"""Dim of heads, and the dim along which a repeated one is expanded before it is merged into heads."""


@dataclass(frozen=True)
class Repeated:
    """`[b, h, t, d]`, every head `times` over."""

    base: Ref
    shape: tuple[int, ...]
    times: int


def with_grouped_heads(graph: Graph) -> Graph:
    """An equal graph whose attention reads no repeated heads, where both keys and values are, and all gradients can follow."""
    attention: dict[tuple[Ref, Ref], list[Op]] = {}
    for op in graph.of_kind("call"):
        if op.target in READS:
            key, value = (op.args[i] for i in READS[op.target])
            attention.setdefault((key, value), []).append(op)
    changed: dict[str, Op] = {}
    same: dict[Ref, Ref] = {}
    for pair, ops in attention.items():
        found = [_repeated(graph, ref) for ref in pair]
        if None in found or found[0].times != found[1].times:
            continue
        sums = [_sums(graph, op, found) for op in ops if op.target is BACKWARD]
        if None not in sums:
            changed |= {op.name: _on_bases(op, found) for op in ops}
            same |= {ref: made for each in sums for ref, made in each.items()}
    return _replaced(graph, changed, same) if changed else graph


def _repeated(graph: Graph, ref: Any) -> Repeated | None:
    """What `ref` repeats: view(clone(expand(x))) with a group dim of size 1 in x, as unsqueeze makes it."""
    merged = _maker(graph, ref, aten.view.default)
    copied = merged and (_maker(graph, merged.args[0], aten.clone.default) or merged)
    wide = copied and _maker(graph, copied.args[0], aten.expand.default)
    one = wide and (_maker(graph, wide.args[0], aten.unsqueeze.default) or _maker(graph, wide.args[0], aten.view.default))
    if not one:
        return None
    base, shape = one.args[0], wide.outputs[0].shape
    kept = (*shape[:GROUP], *shape[GROUP + 1:])
    narrow = (*shape[:GROUP], 1, *shape[GROUP + 1:])
    fits = len(shape) == 5 and graph.meta(base).shape == kept and one.outputs[0].shape == narrow
    return Repeated(base, kept, shape[GROUP]) if fits and merged.outputs[0].shape == _wide(kept, shape[GROUP]) else None


def _wide(shape: tuple[int, ...], times: int) -> tuple[int, ...]:
    return (shape[0], shape[HEADS] * times, *shape[HEADS + 1:])


def _maker(graph: Graph, ref: Any, target: Any) -> Op | None:
    op = graph.op(ref.op) if isinstance(ref, Ref) else None
    return op if op is not None and op.kind == "call" and op.target is target else None


def _sums(graph: Graph, backward: Op, found: list[Repeated]) -> dict[Ref, Ref] | None:
    """Of the gradients of repeated keys and values, the sum over what is repeated, and the gradient that will be it. None where something
    else reads one."""
    out = {}
    for i, repeated in enumerate(found, 1):
        made = Ref(backward.name, i)
        for end in _ends(graph, made, repeated):
            if end is None:
                return None
            out[end] = made
    return out


def _ends(graph: Graph, made: Ref, repeated: Repeated) -> Iterator[Ref | None]:
    (b, h, *rest), n = repeated.shape, repeated.times
    for name, _ in graph.users.get(made, ()):
        view = graph.op(name)
        sums = _only_reader(graph, Ref(name)) if view.target is aten.view.default and view.outputs[0].shape == (b, h, n, *rest) else None
        if sums is None or sums.target is not aten.sum.dim_IntList or tuple(d % 5 for d in sums.args[1]) != (GROUP,) or sums.kwargs:
            yield None
        elif sums.outputs[0].shape == repeated.shape:
            yield Ref(sums.name)
        else:
            last = _only_reader(graph, Ref(sums.name))
            flat = last is not None and last.target in (aten.squeeze.dim, aten.squeeze.dims, aten.view.default)
            yield Ref(last.name) if last is not None and flat and last.outputs[0].shape == repeated.shape else None


def _only_reader(graph: Graph, ref: Ref) -> Op | None:
    users = graph.users.get(ref, ())
    return graph.op(users[0][0]) if len(users) == 1 and graph.op(users[0][0]).kind == "call" else None


def _on_bases(op: Op, found: list[Repeated]) -> Op:
    args, outputs = list(op.args), list(op.outputs)
    for position, repeated in zip(READS[op.target], found, strict=True):
        args[position] = repeated.base
        if op.target is BACKWARD and (meta := outputs[position - 1]) is not None:
            outputs[position - 1] = replace(meta, shape=repeated.shape, factors=())
    return replace(op, args=tuple(args), outputs=tuple(outputs))


def _replaced(graph: Graph, changed: Mapping[str, Op], same: Mapping[Ref, Ref]) -> Graph:
    ops = (changed.get(op.name, op) for op in graph.ops)
    return replace(graph, ops=tuple(op.reading(lambda ref: same.get(ref, ref)) if any(ref in same for ref in op.refs) else op for op in ops))
