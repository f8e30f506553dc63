"""The program of a batch whose rows lie between those of two others that were traced: made of these two, not traced."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from typing import Any

import torch

from autoshard._torch import pytree
from autoshard.pipeline.microbatches.resize import Line, Unlike
from autoshard.program.calling import Traced

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""What a model is called with."""


def made_between(call: Call, known: Sequence[tuple[Call, Traced]]) -> Traced | None:
    """The program of `call`, a batch between two of `known`; None where there are no such, or their programs differ by more than numbers of the
    form c + d x rows. A model that looks at the number of its rows may do something else in between: its program, made when it
    runs, has another hash then, and a plan for this one is refused."""
    for (one, a), (other, b) in combinations(known, 2):
        rows = _rows(call, one, other)
        if rows is None or a.graph.notes != b.graph.notes or a.calling.constants.keys() != b.calling.constants.keys():
            continue
        own, first, second = rows
        try:
            graph = Line(Fraction(own - first, second - first), first, second).graph(a.graph, b.graph, 1)
        except Unlike:
            continue
        inputs = tuple(op.outputs[0] for op in graph.of_kind("input"))
        return replace(a, graph=graph, calling=replace(a.calling, inputs=inputs))
    return None


def _rows(call: Call, one: Call, other: Call) -> tuple[int, int, int] | None:
    """Rows of three batches that differ in nothing else; None where they do, or where the first is not between the other two."""
    (own, tree), (first, tree_1), (second, tree_2) = map(pytree.tree_flatten, (call, one, other))
    if not tree == tree_1 == tree_2:
        return None
    found = set()
    for values in zip(own, first, second, strict=True):
        if not all(isinstance(v, torch.Tensor) for v in values):
            if any(isinstance(v, torch.Tensor) for v in values) or values[0] != values[1] or values[0] != values[2]:
                return None
            continue
        if len({(v.dtype, v.device, v.requires_grad, v.shape[1:]) for v in values}) > 1:
            return None
        if len({v.shape for v in values}) > 1:
            found.add(tuple(v.shape[0] for v in values))
    if len(found) != 1:
        return None
    rows = found.pop()
    return rows if min(rows[1:]) < rows[0] < max(rows[1:]) else None
