"""The program of a batch, from that of another one and a trace of a few of the model's layers.

Layers that are equal in the program that is known (space/layers.py) are one here: the model is traced with the first of them alone, and the
others get what is different there. Everything that a trace says of a batch beside its ops is a number (dims of tensors, arguments that say them)
or a constant. The program that is made is one that the ops themselves allow: every op reads what its counterpart reads in the trace. What
is not seen is a layer that does something else than its equals at this batch; the program of such a model has another hash when it runs, and a plan
for this one is refused.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from autoshard.base.graph import Graph, Op, Ref
from autoshard.errors import TraceError
from autoshard.pipeline.microbatches.resize import Unlike
from autoshard.program.calling import Traced
from autoshard.space.layers import Layer, equal_layers

WORTH = 0.5
"""Part of the ops that must be in layers that are left out: the trace of the rest, and this, cost about as much as is saved with less."""


def made_from_one(known: Traced, trace_without: Callable[..., Traced]) -> Traced | None:
    """The program of another batch of the same model, traced in the same way. `trace_without(without=paths)`: the trace of that batch by a model
    without these submodules. None where few ops are in equal layers, where the model does not run without some of them, and where its program differs
    by more than numbers."""
    groups = list(equal_layers(known.graph))
    paths = frozenset(layer.path for group in groups for layer in group[1:])
    if sum(len(layer.ops) for group in groups for layer in group[1:]) < WORTH * len(known.graph.ops) or _shared(known.graph, paths):
        return None
    try:
        short = trace_without(without=paths)
        return _alike(known, short, groups)
    except (TraceError, Unlike):  # whoever asked traces all of it, and says what is wrong
        return None


def _shared(graph: Graph, paths: frozenset[str]) -> bool:
    """Whether something in these modules is known by another name, too."""
    return any(name.startswith(f"{path}.") for names in graph.tied for name in names for path in paths)


def _alike(known: Traced, short: Traced, groups: list[list[Layer]]) -> Traced:
    """The program of all layers, with the numbers of the short one. Raises Unlike."""
    a, b = known.graph, short.graph
    if (a.training, a.in_tree, a.out_tree, a.notes) != (b.training, b.in_tree, b.out_tree, b.notes) or (
            known.calling.constants.keys() != short.calling.constants.keys()):
        raise Unlike("a batch is passed otherwise, or has other constants")
    image = _images(a, b, groups)
    for op in a.ops:
        for ref, there in zip(op.refs, image[op.name].refs, strict=True):
            ours, theirs = image[ref.op].outputs[ref.index], b.meta(there)
            if ours is not theirs and ours != theirs:
                raise Unlike(f"{op.where} reads {ours}, and its equal {theirs}")
    return Traced(replace(a, ops=tuple(_renumbered(op, image[op.name]) for op in a.ops)), short.calling)


def _images(graph: Graph, short: Graph, groups: list[list[Layer]]) -> dict[str, Op]:
    """Of every op the one with its numbers. Raises Unlike."""
    first = {op.name: first.name for group in groups for layer in group[1:] for op, first in zip(layer.ops, group[0].ops, strict=True)}
    kept = [op for op in graph.ops if op.name not in first]
    if len(kept) != len(short.ops):
        raise Unlike(f"the program has {len(kept)} ops with few layers at one batch, and {len(short.ops)} at another")
    image = {op.name: other for op, other in zip(kept, short.ops, strict=True)}
    for op, other in zip(kept, short.ops, strict=True):
        if (op.target, op.module) != (other.target, other.module) or len(op.refs) != len(other.refs):
            raise Unlike(f"{op.where} of one batch is {other.where} of another")
    image |= {name: image[of] for name, of in first.items()}
    beside = {op.name for group in groups for op in group[0].ops}  # their neighbours are others there
    for op, other in zip(kept, short.ops, strict=True):
        for ref, there in zip(op.refs, other.refs, strict=True):
            same = image[ref.op].name == there.op or op.name in beside and ref.op in first
            if not same or ref.index != there.index:
                raise Unlike(f"{op.where} reads other values than {other.where}")
    return image


def _renumbered(op: Op, other: Op) -> Op:
    """The op with the numbers of its image. Raises Unlike."""
    if (op.kind, op.phase, len(op.outputs)) != (other.kind, other.phase, len(other.outputs)):
        raise Unlike(f"{op.where} of one batch is {other.where} of another")
    return replace(op, args=_value(op.args, other.args, op), kwargs=_value(op.kwargs, other.kwargs, op), outputs=other.outputs)


def _value(ours: Any, theirs: Any, op: Op) -> Any:
    """The argument of the image in the place of ours. Raises Unlike."""
    if isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        return tuple(_value(x, y, op) for x, y in zip(ours, theirs))
    if type(ours) is type(theirs) and (isinstance(ours, Ref) or ours == theirs):
        return ours
    if type(ours) is type(theirs) and type(ours) in (int, float):
        return theirs
    raise Unlike(f"{op.where}: {ours} at one batch and {theirs} at another")
