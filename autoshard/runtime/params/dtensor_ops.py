"""Ops of DTensors that torch computes wrong, without an error, made right.

Parameters, gradients and large outputs of a compiled model are DTensors, and training loops compute with them. torch 2.13 gives other
numbers than for plain tensors for

* `item()`, `float()`, `bool()`, `if` of a Partial tensor (`p.grad.norm().item()`): the share of this rank alone;
* `any` along a split dim: a sum of bools, which counts ranks after a cast;
* losses with reduction="mean": backward divides by the elements of a rank's piece, and means of uneven pieces count alike;
* norms along a split dim: a later sum adds norms of pieces.

Each of them is done by other ops of DTensors, which are right. What torch does right stays as it is, and so does an op for which torch, or
somebody else, has a function like these already.
"""
from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Timer
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from autoshard import _torch
from autoshard.program.tracing.tape import describe, is_user_file

log = logging.getLogger("autoshard")
LONG = 15.0
"""Seconds."""
aten = torch.ops.aten
Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
LOSSES = (aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss, aten.soft_margin_loss, aten.binary_cross_entropy)
BACKWARDS = (aten.mse_loss_backward, aten.smooth_l1_loss_backward, aten.huber_loss_backward, aten.soft_margin_loss_backward,
             aten.binary_cross_entropy_backward)


@cache
def mend_dtensors() -> None:
    """Once per process, for all DTensors."""
    for op, run in (*_in_other_ops(), (aten._local_scalar_dense.default, _number), (aten.linalg_vector_norm.default, _norm),
                    *((getattr(aten.any, name), _any) for name in ("default", "dim", "dims"))):
        _torch.on_dtensors(op, run)


def _in_other_ops() -> list[tuple[Any, Run]]:
    ops = [op.default for op in (*LOSSES, *BACKWARDS, aten.binary_cross_entropy_with_logits)]
    return [(op, lambda op, args, kwargs: _torch.in_other_ops(op)(*args, **kwargs)) for op in ops]


@torch.no_grad()
def _number(op: Any, args: tuple[DTensor], kwargs: dict[str, Any]) -> Any:
    """The number that the ranks have together; every rank calls this."""
    x, = args
    if all(p.is_replicate() for p in x.placements):
        return op(x.to_local())
    with _told_if_alone():
        return op(x.redistribute(placements=[Replicate()] * x.device_mesh.ndim).to_local())


@contextmanager
def _told_if_alone() -> Iterator[None]:
    """A rank that takes a number alone, to print it, waits for the others as long as torch does: half an hour. It says so before."""
    timer = Timer(LONG, log.warning, (
        "rank %d has waited %.0f s for the other ranks to take the number of a DTensor too%s: the number is made of pieces that all ranks have, so "
        "every rank must call item(), float() or bool() there; take it outside of `if rank == 0`", dist.get_rank(), LONG, _at()))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _at() -> str:
    frame: FrameType | None = sys._getframe()
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f", at {describe(frame.f_code, frame.f_lineno)}"


def _any(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, *where = args
    return (x != 0).sum(*where, **kwargs) > 0


def _norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of the whole tensor as torch has it, which is right and reduces late: the norm of many norms needs one collective."""
    return _norm_of(op, kwargs, *args)


def _norm_of(op: Any, kwargs: dict[str, Any], x: Any, order: float = 2, dim: Any = None, keepdim: bool = False) -> Any:
    if dim is None and not keepdim:
        return torch._foreach_norm([x], order, **kwargs)[0]
    return _torch.in_other_ops(op)(x, order, dim, keepdim, **kwargs)
