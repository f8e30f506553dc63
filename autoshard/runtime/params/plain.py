"""Plain tensors beside DTensors: each counts as the whole tensor, the same on all ranks.

A rank's own part of a batch (`inputs="local"`), or noise that every rank draws from a seed of its own, would be taken for it too, and give other
numbers on every rank. So ranks compare a number of each, at the calls 1, 2, 3, 5, 9, 17, ... of an op with such a tensor, in one small collective."""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.errors import UsageError
from autoshard.runtime.params.told import told_if_alone
from autoshard.runtime.ranks.same_inputs import is_due

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.mv.default)
"""Ops that a rank's own part of a batch fits into: nothing says how many rows the whole has."""
POINTWISE = (aten.mul.Tensor, aten.div.Tensor, aten.pow.Tensor_Tensor, aten.where.self, aten.maximum.default, aten.minimum.default, aten.lerp.Tensor,
             aten.lerp.Scalar, aten.addcmul.default, aten.addcdiv.default, aten.masked_fill.Scalar, aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor,
             aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor, aten.logical_and.default, aten.logical_or.default, aten.bitwise_and.Tensor,
             aten.bitwise_or.Tensor)
"""Ops into which noise or a mask goes."""
NEAR = 1e-2
"""Of a tensor's norm. Machines may round otherwise than each other."""
_calls: Counter[Any] = Counter()


def compare(op: Any, args: Sequence[Any]) -> None:
    """Raises UsageError on all ranks where some have other numbers. Every rank calls this."""
    first = next((a for a in args if isinstance(a, DTensor)), None)
    given = [a for a in args if type(a) in (torch.Tensor, nn.Parameter) and a.numel() > 1 and not a.is_meta]
    if first is None or not given or op._schema.is_mutable and not any(p.is_replicate() for p in first.placements):
        return  # into a tensor of which no two ranks have the same piece each may write what it has
    for t in given:
        if _is_due(op, t) and not _is_same(t.detach(), first.device_mesh, f"do {op} of a DTensor and a plain tensor"):
            raise UsageError(f"ranks have different numbers in the plain tensor of {tuple(t.shape)} that {op} takes beside a DTensor, where it "
                             "counts as the whole tensor, the same on all ranks. If it is this rank's part of a batch, pass "
                             "DTensor.from_local(t, p.device_mesh, [Shard(0), ...]), or take .full_tensor() of the DTensor; if it is random, draw "
                             "it under a seed that all ranks have")


def compare_drawn(op: Any, t: torch.Tensor, x: DTensor) -> None:
    """The same for random numbers that every rank drew for the whole `x`, of which some ranks have copies. Every rank calls this."""
    if any(p.is_replicate() for p in x.placements) and _is_due(op, t) and not _is_same(t, x.device_mesh, f"draw numbers of a DTensor ({op})"):
        raise UsageError(f"ranks draw different numbers in {op} of a DTensor of {tuple(x.shape)} that some of them have copies of: their "
                         "generators are not in the same state. Seed all ranks alike before (torch.manual_seed), or pass generator=, made with "
                         "a seed that all ranks have")


def _is_due(op: Any, t: torch.Tensor) -> bool:
    key = op, t.shape, t.dtype
    _calls[key] += 1
    return is_due(_calls[key] - 1, "first")


@torch.no_grad()
def _is_same(t: torch.Tensor, mesh: Any, do_what: str) -> bool:
    flat = (torch.view_as_real(t) if t.is_complex() else t).to(torch.float64).flatten().nan_to_num()
    number = flat @ torch.arange(len(flat), dtype=torch.float64, device=t.device).cos()
    seen = torch.stack([number, -number, flat.norm()]).to(mesh.device_type)
    with told_if_alone(do_what):
        for axis in range(mesh.ndim):
            dist.all_reduce(seen, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    most, least, norm = seen.tolist()
    return most + least <= NEAR * norm
