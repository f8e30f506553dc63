"""One order for what a model computes before it reads a weight.

Models of transformers compute masks and rotary embeddings once per kind of layer, in a loop over `set(config.layer_types)`. A set of texts has
another order in every process, so ranks would trace different programs, and a plan made by one command would not fit the next one.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import torch

from autoshard.base.graph import Graph, Op
from autoshard.program.tracing.tape import is_random


def in_order_of_use(graph: Graph) -> Graph:
    """A recorded graph in which neighbouring ops that depend on no weight are in the order in which the rest reads them, where a line was run
    several times for them; these share their names anew. Of all that depends on no weight, what nothing reads is left out."""
    free = _without_weights(graph)
    rank = _ranks(graph, free)
    ops: list[Op] = []
    names: dict[str, str] = {}
    for of_free, run in groupby(graph.ops, key=lambda op: op.name in free):
        its: Sequence[Op] = tuple(run)
        if of_free:
            its = _ordered(its, rank, names) if _repeats(its) else [op for op in its if op.name in rank]
        ops += its
    return replace(graph, ops=tuple(_renamed(op, names) for op in ops))


def _without_weights(graph: Graph) -> frozenset[str]:
    """Forward ops of torch that are computed of inputs, buffers and constants alone, and draw nothing."""
    free: set[str] = set()
    data = {op.name for op in graph.of_kind("input", "buffer")}
    for op in graph.ops:
        if op.kind == "call" and op.phase == "forward" and isinstance(op.target, torch._ops.OpOverload) and op.target.namespace == "aten" \
                and not is_random(op.target) and all(r.op in free or r.op in data for r in op.refs):
            free.add(op.name)
    return frozenset(free)


def _repeats(run: Sequence[Op]) -> bool:
    """Whether the code went through one line more than once, as a loop does, which makes an op of a kind there each time."""
    return len({(op.target, op.source) for op in run}) < len(run)


def _ranks(graph: Graph, free: frozenset[str]) -> dict[str, int]:
    """Of those of `free` that the others read: when they are needed, what an op reads before it."""
    rank: dict[str, int] = {}
    for reader in graph.ops:
        if reader.name in free:
            continue
        todo = [iter(reader.refs)]
        path: list[str] = []
        while todo:
            ref = next(todo[-1], None)
            if ref is None:
                todo.pop()
                if path:
                    rank.setdefault(path.pop(), len(rank))
            elif ref.op in free and ref.op not in rank:
                path.append(ref.op)
                todo.append(iter(graph.op(ref.op).refs))
    return rank


def _ordered(run: Sequence[Op], rank: Mapping[str, int], names: dict[str, str]) -> list[Op]:
    """The ops of a run that are read, in that order. Their names and numbers are those of the run, lowest first; new names go into `names`."""
    there: dict[str, list[int]] = defaultdict(list)
    for op in run:
        base, _, number = op.name.rpartition("_")
        there[base].append(int(number))
    unused, numbers = {base: iter(sorted(its)) for base, its in there.items()}, sorted(op.traced_at for op in run)
    ops = sorted((op for op in run if op.name in rank), key=lambda op: rank[op.name])
    for op in ops:
        base = op.name.rpartition("_")[0]
        names[op.name] = f"{base}_{next(unused[base])}"
    return [replace(op, traced_at=number) for op, number in zip(ops, numbers, strict=False)]


def _renamed(op: Op, names: Mapping[str, str]) -> Op:
    read = op.reading(lambda ref: replace(ref, op=names[ref.op]) if ref.op in names else ref) if any(r.op in names for r in op.refs) else op
    return replace(read, name=names[op.name]) if op.name in names else read
