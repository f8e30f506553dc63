"""Results of a call that the loss does not use: what only they lead to has no gradient, as with autograd, and no optimizer moves it."""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from autoshard.base.graph import Graph
from autoshard.base.roles import Role
from autoshard.errors import UsageError

Form = tuple[torch.Size, torch.dtype, torch.device]


def form_of(t: torch.Tensor) -> Form:
    """What zeros instead of its gradient need."""
    return t.shape, t.dtype, t.device


def check_left_out(tangents: Sequence[Any], left_out: Collection[int]) -> None:
    """Raises UsageError where a gradient arrives at a result that has none here: it would be lost."""
    if arrived := [i for i in left_out if tangents[i] is not None]:
        raise UsageError(f"a gradient arrives at output {arrived[0]} of the compiled model, and of a result with a scalar \"loss\" only the loss is "
                         "differentiated: add that term to the loss inside of the model, or in loss_fn, or detach() the output")


def as_zeros(tangents: Sequence[Any], missing: Mapping[int, Form]) -> list[Any]:
    """What a program is given, which computes all gradients in any case. `missing`: tangents that did not arrive."""
    filled = list(tangents)
    for i, (shape, dtype, device) in missing.items():
        filled[i] = torch.zeros(shape, dtype=dtype, device=device)
    return filled


def results_behind(graph: Graph) -> dict[Any, frozenset[int]]:
    """By what a gradient is of, the results of the model whose gradients it is computed from."""
    behind: dict[str, frozenset[int]] = {}
    for op in graph.ops:
        behind[op.name] = frozenset({op.target}) if op.kind == "tangent" else frozenset().union(*(behind[r.op] for r in op.refs))
    return {name: behind[op.name] for name, op in graph.outputs(Role.GRADIENT).items()}
