"""Windows of a step with micro-batches: what runs once a step, and what runs for every micro-batch.

    start     once: parameters are brought where all micro-batches read them
    forward, backward (and what else there is)   for every micro-batch
    end       once: accumulated gradients are reduced

Two identities mark the borders. `hold` stands for a parameter over the whole step: the layout of what it reads is a choice, made once.
`accumulate` stands for a gradient summed over micro-batches: its layout is that of the accumulator."""
from __future__ import annotations

from typing import Any

import torch

START, END = "start", "end"
ONCE = (START, END)
CAT, SUM, MEAN, WEIGHTED, SAME = "cat", "sum", "mean", "weighted", "same"
"""How a result of the batch is made of those of its micro-batches: one after another along a dim; added up; their mean; their mean by
weights that the graph computes; it is the same for all."""
BATCH_DIM, JOIN, JOIN_DIM = "batch_dim", "join", "join_dim"
"""Keywords of inputs and user outputs."""
WEIGHTS = "weights"
"""How the last user output is put together where it is the weight of a micro-batch, which no user sees. As a keyword of it: how large a weight
is, about."""
HOLD, ACCUMULATE = "autoshard.hold.default", "autoshard.accumulate.default"


@torch.library.custom_op("autoshard::hold", mutates_args=())
def _hold(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("autoshard::accumulate", mutates_args=())
def _accumulate(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@_hold.register_fake
@_accumulate.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def hold_op() -> Any:
    return torch.ops.autoshard.hold.default


def accumulate_op() -> Any:
    return torch.ops.autoshard.accumulate.default


def is_hold(op: Any) -> bool:
    return op.kind == "call" and str(op.target) == HOLD


def is_accumulator(op: Any) -> bool:
    return op.kind == "call" and str(op.target) == ACCUMULATE


def batch_dim_of(op: Any) -> int | None:
    """The dim of an input that micro-batches split; None where all read it whole."""
    found: int | None = dict(op.kwargs).get(BATCH_DIM)
    return found


def join_of(op: Any) -> str:
    """How a user output is put together; "" in a graph without micro-batches."""
    found: str = dict(op.kwargs).get(JOIN, "")
    return found
