"""Which ops are copies of each other in repeated layers, so that the search may give them one answer.

A *family* is a list of sibling modules ("layers.0", "layers.1", ...: the children of a ModuleList or
Sequential). Two siblings are equal when their ops, forward and backward, parameters and gradients, match one
by one in execution order: same call, same place below the sibling, same inner wiring. The first and the last
sibling of a family stay free: their neighbours differ, and the seams are where a tied plan loses.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autoshard.base.graph import Graph, Op, Ref
from autoshard.program.flow import gradient_bound, is_passing, param_derived

Paths = dict[str, tuple[str, ...]]
"""Op name -> what `op_path` says, or for a cast that no module runs, the path of its parameter."""
Family = tuple[str, ...]
"""Path of the container, with the indices of outer siblings kept."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A sibling: the path of its module, and its ops in execution order."""

    path: str
    ops: list[Op]


def repeated_layers(graph: Graph) -> dict[str, int]:
    """Op name -> class id, for ops of repeated layers. Ops with one id correspond. Other ops are left out."""
    classes: dict[str, int] = {}
    start = 0
    for layers in equal_layers(graph):
        for layer in layers:
            classes.update((op.name, start + i) for i, op in enumerate(layer.ops))
        start += len(layers[0].ops)
    return classes


def equal_layers(graph: Graph) -> Iterator[list[Layer]]:
    """Groups of equal siblings, two or more each. Their ops correspond by position.

    Nested lists are looked at from the outside in: the inner ones only where the outer one repeats nothing."""
    settled: set[Family] = set()
    depth, paths = 0, _paths(graph)
    while families := _families(graph, paths, depth, settled):
        for family, siblings in families.items():
            groups = _equal_siblings(graph, paths, len(family), siblings)
            if groups:
                settled.add(family)
            for group in groups:
                yield [Layer(".".join(paths[ops[0].name][:len(family) + 1]), ops) for ops in group]
        depth += 1


def _families(graph: Graph, paths: Paths, depth: int, settled: set[Family]) -> dict[Family, dict[int, list[Op]]]:
    """Siblings (index -> ops in execution order) of every family whose index is the `depth`-th in its path."""
    out: dict[Family, dict[int, list[Op]]] = defaultdict(lambda: defaultdict(list))
    for op in graph.ops:
        path = paths[op.name]
        indices = [i for i, part in enumerate(path) if part.isdigit()]
        if len(indices) > depth and not any(path[:i] in settled for i in indices[:depth]):
            at = indices[depth]
            out[path[:at]][int(path[at])].append(op)
    return out


def op_path(op: Op) -> tuple[str, ...]:
    """The module path of an op; the qualified name of a parameter, buffer, gradient or mutation."""
    if op.kind in ("param", "buffer"):
        return tuple(op.target.split("."))
    if op.kind == "output":
        return tuple(str(op.target.name).split("."))
    return tuple(op.module.split(".")) if op.module else ()


def _paths(graph: Graph) -> Paths:
    """A precision policy casts parameters before the model runs, in no module, and their gradients when it is through."""
    out, derived, bound = {op.name: op_path(op) for op in graph.ops}, param_derived(graph), gradient_bound(graph)
    outside = [op for op in graph.of_kind("call") if is_passing(op) and not op.module]
    for op in outside:
        if Ref(op.name) in derived:
            out[op.name] = out[op.refs[0].op]
    for op in reversed(outside):
        if Ref(op.name) in bound:
            out[op.name] = out[graph.users[Ref(op.name)][0][0]]
    return out


def _equal_siblings(graph: Graph, paths: Paths, at: int, siblings: dict[int, list[Op]]) -> list[list[list[Op]]]:
    """Groups of at least two equal siblings, first and last excluded; their index is part `at` of their path."""
    equal: dict[Any, list[list[Op]]] = defaultdict(list)
    for index in sorted(siblings)[1:-1]:
        equal[tuple(_signature(graph, paths, at, siblings[index]))].append(siblings[index])
    return [group for group in equal.values() if len(group) > 1]


def _signature(graph: Graph, paths: Paths, at: int, ops: list[Op]) -> Iterator[Any]:
    """What two equal siblings agree on, op by op, without names and without the sibling's own index."""
    position = {op.name: i for i, op in enumerate(ops)}

    def wire(ref: Ref) -> Any:
        # values from outside are not compared: a mask shared by all layers may belong to the first one
        return (position[ref.op], ref.index) if ref.op in position else "outside"

    for op in ops:
        what = graph.calls[op.name] if op.kind == "call" else (op.kind, op.outputs, op.kwargs)
        yield what, op.phase, paths[op.name][at + 1:], tuple(wire(r) for r in op.refs)

