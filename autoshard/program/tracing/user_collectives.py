"""User collectives: functional collectives that the model calls, traced as marks that fix their placements.

A model that is parallelised by hand is traced as on one device: weights are whole and every group has one rank, so a
collective does not change any number. It fixes the placements of its operand and its result on the mesh axis of its group:

    all_reduce(x, op, group)                    Partial(op) -> Replicate
    all_gather_tensor(x, dim, group)            Shard(dim)  -> Replicate
    reduce_scatter_tensor(x, op, dim, group)    Partial(op) -> Shard(dim)
    shard_dim_alltoall(x, a, b, mesh, dim)      Shard(a)    -> Shard(b), an AllToAll that says both dims
    broadcast(x, src, group)                    Replicate   -> Replicate: every rank holds the one device's value

So it is traced as two marks (see seeds/marks.py), one per side. The redistribution between them is priced and lowered like any
other, to the same collective. Seeds and search decide everything else, other mesh axes included.
"""
from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch

from autoshard import _torch
from autoshard.errors import TraceError
from autoshard.program.tracing.tape import ONLY_TAKEN, user_line
from autoshard.seeds.user_placements import group_text

REDUCE = {"sum": "P", "max": "Pmax", "min": "Pmin"}
LOCAL_SHAPES = ("\n  the model calls collectives itself; its shapes are read as those of one device, where every group has one rank: "
                "build it with whole weights, not with a rank's part of them")


def moved(x: torch.Tensor, read: str, made: str, group: Any) -> torch.Tensor:
    """`x` with a mark for how the collective reads it and one for how it leaves it."""
    found = _torch.axis_or_ranks(group)
    text = found if isinstance(found, str) else group_text(found)
    if text is None:
        raise TraceError(f"a collective is over the ranks {found}, which are no axis of a mesh{user_line()}; "
                         "give it a DeviceMesh of one axis, (DeviceMesh, dim), or an axis's process group or name")
    mark = torch.ops.autoshard.annotate
    return mark(mark(x, read, text), made, text)


def parts(reduce_op: str) -> str:
    """The placement of an operand that is reduced."""
    if reduce_op.lower() not in REDUCE:
        raise TraceError(f"a collective reduces by {reduce_op!r}{user_line()}; the parts of a plan's tensors are summed, or their "
                         "max or min is taken: write an average as a sum and a division")
    return REDUCE[reduce_op.lower()]


def dim(x: torch.Tensor, d: int) -> str:
    """The placement of a tensor that is split along `d`."""
    x.size(d)  # torch says what is wrong with a dim that is not there
    return f"S{d % x.ndim}"


def alone() -> AbstractContextManager:
    """While inside, functional collectives return what they are given, as on one device: for running a model for reference."""
    return _torch.functional_collectives_run(dict.fromkeys(STAND_INS, _identity))


MEANINGLESS = {
    "all_to_all_single": "which exchanges pieces along dim 0 and does not say which dim of the whole tensor is split before and after; "
                         "shard_dim_alltoall(x, gather_dim, shard_dim, mesh, mesh_dim) says both",
    "permute_tensor": "which passes pieces from rank to rank, and a whole tensor has none",
}


def refused(name: str) -> NoReturn:
    raise TraceError(f"the model calls {name}{user_line()}, {MEANINGLESS[name]}\n  {ONLY_TAKEN}")


# -- what runs in place of torch's functions while a model is traced: code that uses no name from here -----------------------

def _all_reduce(self, reduceOp, group, tag=""):
    from autoshard.program.tracing import user_collectives
    return user_collectives.moved(self, user_collectives.parts(reduceOp), "R", group)


def _all_gather(self, gather_dim, group, tag=""):
    from autoshard.program.tracing import user_collectives
    return user_collectives.moved(self, user_collectives.dim(self, gather_dim), "R", group)


def _reduce_scatter(self, reduceOp, scatter_dim, group, tag=""):
    from autoshard.program.tracing import user_collectives
    return user_collectives.moved(self, user_collectives.parts(reduceOp), user_collectives.dim(self, scatter_dim), group)


def _identity(x, *args, **kwargs):
    return x


def _all_to_all(*args, **kwargs):
    from autoshard.program.tracing import user_collectives
    user_collectives.refused("all_to_all_single")


def _shard_dim_all_to_all(input, gather_dim, shard_dim, mesh, mesh_dim):
    from autoshard.program.tracing import user_collectives
    group = mesh if isinstance(mesh, str) else (mesh, mesh_dim)
    return user_collectives.moved(input, user_collectives.dim(input, gather_dim), user_collectives.dim(input, shard_dim), group)


def _broadcast(self, src, group, tag=""):
    from autoshard.program.tracing import user_collectives
    return user_collectives.moved(self, "R", "R", group)


def _permute(*args, **kwargs):
    from autoshard.program.tracing import user_collectives
    user_collectives.refused("permute_tensor")


STAND_INS = {
    "all_reduce": _all_reduce, "wait_tensor": _identity, "broadcast": _broadcast, "permute_tensor": _permute,
    "all_gather_tensor": _all_gather, "all_gather_tensor_autograd": _all_gather,
    "all_gather_single": _all_gather, "all_gather_single_autograd": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter, "reduce_scatter_tensor_autograd": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter, "reduce_scatter_single_autograd": _reduce_scatter,
    "shard_dim_alltoall": _shard_dim_all_to_all, "all_to_all_single": _all_to_all, "all_to_all_single_autograd": _all_to_all,
}
