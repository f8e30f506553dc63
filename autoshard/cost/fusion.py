"""What ops neither read nor write: pointwise ops that a fusing backend runs in one kernel, and writes of rows in place.

Within one window (forward or backward), a value that a pointwise op makes and a pointwise op of the same shape reads
stays in registers: the reader does not read it, and it is not written unless somebody else needs it. A chain is
then charged for what goes in and what comes out, once. A change of layout inside a chain would break it in
two; that is left out, as units of ops (space/decision_units.py) rarely change layout inside.

A write that replaces rows of a state (rules/states.py) reads the new rows and writes them; the others stay as they are.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autoshard.base.graph import Graph, Op, Ref
from autoshard.base.windows import is_accumulator, is_hold
from autoshard.cost.cluster import Device
from autoshard.rules import registry
from autoshard.rules.family import Family
from autoshard.rules.states import written_in_place


@dataclass(frozen=True)
class Fused:
    """Positions of the tensor inputs an op does not read, and of the outputs it does not write. `in_place`: rows of the first input are
    replaced where they are."""

    unread: frozenset[int] = frozenset()
    unwritten: frozenset[int] = frozenset()
    in_place: bool = False


NOTHING, IN_PLACE = Fused(), Fused(in_place=True)


def untouched(graph: Graph, device: Device, open_ends: bool = False) -> Mapping[str, Fused]:
    """Per op on a device what it need not read or write; ops that touch all of their tensors are left out. `open_ends`: of a part of a program,
    at least: what is at its other ends may be in the same chain."""
    return {**(fused(graph, open_ends) if device.fuses else {}), **dict.fromkeys(written_in_place(graph), IN_PLACE)}


def fused(graph: Graph, open_ends: bool = False) -> Mapping[str, Fused]:
    """Per op that is part of a chain, what it saves; other ops are left out."""
    out = {}
    ends = frozenset(op.name for op in graph.ops if open_ends and (op.is_port or is_hold(op) or is_accumulator(op)))
    for op in graph.ops:
        if is_pointwise(op):
            unread = frozenset(i for i, ref in enumerate(op.refs) if ref.op in ends or _joins(graph, graph.op(ref.op), ref, op))
            unwritten = frozenset(i for i in range(len(op.outputs)) if _stays(graph, op, Ref(op.name, i), ends))
            if unread or unwritten:
                out[op.name] = Fused(unread, unwritten)
    return out


def is_pointwise(op: Op) -> bool:
    """Casts, too: alone they are priced as copies, in a chain they are one of its ops."""
    return (registry.family_of(op) is Family.POINTWISE or op.target is torch.ops.aten._to_copy.default) and bool(op.refs)


def _stays(graph: Graph, maker: Op, ref: Ref, ends: frozenset[str]) -> bool:
    readers = [graph.op(name) for name, _ in graph.users.get(ref, ())]
    return bool(readers) and all(reader.name in ends or _joins(graph, maker, ref, reader) for reader in readers)


def _joins(graph: Graph, maker: Op, ref: Ref, reader: Op) -> bool:
    """Whether `reader` finds the value in registers."""
    return (is_pointwise(maker) and is_pointwise(reader) and maker.phase == reader.phase
            and graph.meta(ref).shape == graph.meta(Ref(reader.name)).shape)
