"""Random numbers in DTensors: those that one process draws for the whole tensor, which every rank draws and cuts.

On CPUs torch 2.13 has each rank draw for its own piece. Pieces of ranks that are seeded alike then hold the same numbers, and once pieces were not
equally long, generators are out of step: weights that ranks have copies of get other noise on every rank. Some ops (`exponential_`, `geometric_`)
are drawn so on GPUs, too, and for others (`random_`, `torch.normal(p, 0.1)`) it has no placements at all."""
from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from autoshard import _torch
from autoshard.runtime.params import plain, whole

aten = torch.ops.aten


def _overloads(names: str) -> tuple[Any, ...]:
    ops = (getattr(aten, name) for name in names.split())
    return tuple(getattr(op, overload) for op in ops for overload in op.overloads() if "out" not in overload)


WRITTEN = _overloads("normal_ uniform_ bernoulli_ random_ exponential_ geometric_ cauchy_ log_normal_")
LIKE = _overloads("randn_like rand_like randint_like")
READ = _overloads("bernoulli poisson normal multinomial native_dropout _standard_gamma")
"""Ops that look at the numbers of the tensors they take."""
OPS = (*WRITTEN, *LIKE, *READ)
IN_STEP = (aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float, aten.bernoulli.default, aten.native_dropout.default,
           aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype)
"""Ops for which torch has the ranks' GPUs draw as one."""


def drawn(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Every rank calls this, with its generator in the same state."""
    x = next(a for a in (*args, *kwargs.values()) if isinstance(a, DTensor))
    if x.is_meta or op in IN_STEP and x.device_mesh.device_type != "cpu":
        return NotImplemented
    if op in READ:
        made = op(*whole.values(args), **whole.values(kwargs))
    else:
        made = op(torch.empty(x.shape, dtype=x.dtype, device=x.device), *whole.values(args[1:]), **kwargs)
    if op in WRITTEN:
        plain.compare_drawn(op, made, x)
        return x.copy_(made)
    return _torch.pytree.tree_map_only(torch.Tensor, lambda t: _placed(op, t, x), made)


def _placed(op: Any, t: torch.Tensor, x: DTensor) -> DTensor:
    """As `x` lies, where it is as large."""
    mesh = x.device_mesh
    placements = [Replicate() if p.is_partial() or t.shape != x.shape else p for p in x.placements]
    made = DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False).redistribute(placements=placements)
    plain.compare_drawn(op, t, made)
    return made
