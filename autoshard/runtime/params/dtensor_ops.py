"""Ops of DTensors that torch computes wrong, without an error, made right.

Parameters, gradients and large outputs of a compiled model are DTensors, and training loops compute with them. torch 2.13 gives other
numbers than for plain tensors for

* `item()`, `float()`, `bool()`, `if` of a Partial tensor (`p.grad.norm().item()`): the share of this rank alone;
* `any` along a split dim: a sum of bools, which counts ranks after a cast;
* losses with reduction="mean": backward divides by the elements of a rank's piece, and means of pieces count alike, uneven ones, or with
  targets that do not count;
* norms along a split dim: a later sum adds norms of pieces;
* reductions over `dim=[]`, which is what the backward of `amax()` calls: each rank's own;
* writes by index along a split dim (`index_add_`), `torch.eye(out=)` (`nn.init.eye_`): every rank's piece is called the whole;
* `fill_` of a sum that is not added up: each rank's share becomes the number (in `cosine_embedding_loss`, too);
* `squeeze_` (in `v @ p`): the dim stays;
* `+` and `-` of a sum that is not added up (`(p == 0).sum()`) and a number, once such a sum of 64 bits met a whole DTensor: torch's cache takes
  the two for the same, and every rank adds the number; where the number came first (`sum(... for p in parameters)` begins with 0), torch fails;
* `torch.div(2, p.sum())`, once `p.sum() / 2` was asked: that, and so is what divides a whole tensor after it;
* the same of a sum and a whole DTensor, both of integers: torch adds them in float32;
* `cat` and `stack` of norms that are not added up and other tensors: their sum adds up powers of all of them;
* writes into a slice along a split dim (`p[0] = 0`): they go into a copy ([slices.py](slices.py));
* what `GradScaler` looks for in gradients that lie in different ways: ranks hear of numbers that are not finite as the first gradient lies, so that
  some leave out a step that others take;
* scans, `argmax` and the backward of `select` whose dim is counted from the end (`p.cumsum(-1)`): another dim, or an error;
* `renorm_`, once `renorm` was called: the piece is called the whole;
* random numbers on CPUs: each rank's own ([drawn.py](drawn.py));
* views of weights, and numbers of them, in `torch.inference_mode()`: an error;
* numbers that ids pick along a split dim (`log_probs.gather(1, actions)`): whoever reads them a second time gets an error;
and for `_foreach_copy_`, with which loops put averaged weights in place, it has nothing at all. What it refuses to do in place, as on what is not
added up (`p.norm().clamp_(min=eps)`, `p.sum().add_(1)`), is done out of place, and written. A number is written where a mask says
(`p[p.abs() < 1e-2] = 0`), for which it wants to know how many places there are. A plain tensor beside a DTensor is the whole one, the same on all
ranks: torch can take it so, but for writes into it. Ops that torch has no way for are done on the whole tensors ([whole.py](whole.py)).

Each of them is done by other ops of DTensors, which are right. What torch does right stays as it is, and so does an op for which torch, or
somebody else, has a function like these already.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from autoshard import _torch
from autoshard.runtime.params import drawn, plain, slices, whole
from autoshard.runtime.params.assigned_data import take_assigned_data
from autoshard.runtime.params.mixed_lists import OPS, apart, norm_of_both
from autoshard.runtime.params.strided import cut
from autoshard.runtime.params.told import told_if_alone

aten = torch.ops.aten
Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
LOSSES = (aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss, aten.soft_margin_loss, aten.binary_cross_entropy)
MEAN, SUM = 1, 2
OUT_OF_PLACE = (aten.index_add_.default, aten.index_copy_.default, aten.scatter_add_.default)
LINEAR = (aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar, aten.neg_.default)
ADDS = (aten.add_.Tensor, aten.sub_.Tensor)
IN_PLACE = (*LINEAR, *ADDS, aten.sqrt_.default, aten.rsqrt_.default, aten.reciprocal_.default, aten.pow_.Scalar, aten.exp_.default,
            aten.log_.default, aten.abs_.default, aten.round_.default, aten.trunc_.default, aten.nan_to_num_.default, aten.clamp_.default,
            aten.clamp_.Tensor, aten.clamp_min_.default, aten.clamp_max_.default, aten.masked_fill_.Scalar, aten.lerp_.Scalar, aten.lerp_.Tensor,
            aten.addcmul_.default, aten.addcdiv_.default)
VIEWS = tuple(getattr(getattr(aten, name), overload) for name in "detach alias expand permute squeeze t transpose unbind unsqueeze".split()
              for overload in getattr(aten, name).overloads() if "Dimname" not in overload)
BACKWARDS = (aten.mse_loss_backward, aten.smooth_l1_loss_backward, aten.huber_loss_backward, aten.soft_margin_loss_backward,
             aten.binary_cross_entropy_backward)


@cache
def mend_dtensors() -> None:
    """Once per process, for all DTensors."""
    take_assigned_data()
    _torch.on_total_norm(norm_of_both)
    _torch.take_plain_tensors()
    _torch.on_placements(whole.done_on_the_whole)
    whole.give_lists()
    table = _torch.functions_of_dtensors()
    table[aten._amp_foreach_non_finite_check_and_unscale_.default] = _unscale
    for op in (aten.argmax.default, aten.argmin.default):
        table[op] = partial(_largest, table[op])
    for run, ops in MENDED.items():
        for op in ops:
            mend(op, run)


def mend(op: Any, run: Run) -> None:
    """Have `run(op, args, kwargs)` do an op of DTensors from now on, unless there is a function for that. Where it gives NotImplemented,
    torch does it; what torch refuses to do in place is done out of place. Slices that the op takes, or writes into, are those of the tensor."""
    def asked(op: Any, args: Any, kwargs: Any) -> Any:
        if writes and isinstance(args[0], torch.Tensor) and not isinstance(args[0], DTensor):
            return op(*whole.values(args), **whole.values(kwargs))  # into a plain tensor, the same on all ranks: an optimizer's torch.zeros(shape)
        plain.compare(op, args)
        result = run(op, args, kwargs)
        if result is NotImplemented:
            result = by_torch(args, kwargs)
        if op in whole.READ_ONCE:
            return whole.picks_added_up(result)
        if op in slices.SLICES:
            slices.remember(op, args, kwargs, result)
        elif writes:
            slices.put_back(args[0])
        return result

    def by_torch(args: Any, kwargs: Any) -> Any:
        del table[op]
        try:
            return op(*args, **kwargs)
        except RuntimeError:
            if not writes or torch.Tag.nondeterministic_seeded in op.tags:
                raise
            return _in_place(op, args, kwargs)
        finally:
            table[op] = asked

    table, writes = _torch.functions_of_dtensors(), op._schema.name.endswith("_")
    table.setdefault(op, asked)


def _in_other_ops(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _torch.decomposition_table[op](*args, **kwargs)


@torch.no_grad()
def _number(op: Any, args: tuple[DTensor], kwargs: dict[str, Any]) -> Any:
    """The number that the ranks have together; every rank calls this."""
    x, = args
    if all(p.is_replicate() for p in x.placements):
        return op(x.to_local())
    with told_if_alone("take the number of a DTensor (item(), float(), bool())"):
        return op(x.redistribute(placements=[Replicate()] * x.device_mesh.ndim).to_local())


def _any(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, *where = args
    return (x != 0).sum(*where, **kwargs) > 0


def _norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of the whole tensor as torch has it, which is right and reduces late: the norm of many norms needs one collective."""
    x, order, dim, keepdim = (*args, *(2, None, False)[len(args) - 1:])
    if dim is None and not keepdim:
        return NotImplemented
    dims = list(range(x.ndim)) if dim is None or dim == [] else dim
    return _torch.decomposition_table[op](x, order, dims, keepdim, **kwargs)


def _over_all(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A reduction over no dims is one over all of them."""
    x, *rest = args
    if (rest[0] if rest else kwargs.get("dim")) != []:
        return NotImplemented
    return op(x, list(range(x.ndim)), *rest[1:], **{name: value for name, value in kwargs.items() if name != "dim"})


def _mean_of_counted(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The mean over targets that count, by their weights: the sum over the sum of these."""
    x, target, weight, reduction, ignore_index = args
    if reduction != MEAN:
        return NotImplemented
    total, weights = op(x, target, weight, SUM, ignore_index)
    return total / weights, weights


def _in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the op out of place gives, written to where the tensors lie."""
    made = getattr(aten, op._schema.name[len("aten::"):-1])(*args, **kwargs)
    if isinstance(args[0], DTensor):
        return _put(args[0], made)
    for x, value in zip(args[0], made, strict=True):
        _put(x, value)


def _put(x: DTensor, value: Any) -> DTensor:
    """Views of it stay right: where it is a sum that is not added up, the first rank has the value then, and the others zeros. A norm has no such
    shares of negative numbers, and a product none of zeros, so they become whole tensors."""
    partial = {i: p for i, p in enumerate(x.placements) if p.is_partial()}
    value = value.to(x.dtype).redistribute(placements=[Replicate() if p.is_partial() else p for p in x.placements])
    if not partial:
        return x.copy_(value)
    if any(type(p) is not Partial or p == Partial("product") for p in partial.values()):
        x._local_tensor, x._spec = value._local_tensor, value._spec
    elif all(p != Partial() or x.device_mesh.get_local_rank(i) == 0 for i, p in partial.items()):
        x._local_tensor.copy_(value._local_tensor)
    else:
        x._local_tensor.zero_()
    return x


def _filled(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of a sum that is not added up yet, the first rank has the number, and the others zeros."""
    x, value = args
    if isinstance(value, torch.Tensor):
        return x.fill_(whole.values(value).item())  # what `x[...] = 0` calls; torch has no way to do it, or fills pieces with pieces
    if not any(p.is_partial() for p in x.placements):
        return NotImplemented
    made = torch.full(x.shape, value, dtype=x.dtype, device=x.device)
    return _put(x, DTensor.from_local(made, x.device_mesh, [Replicate()] * x.device_mesh.ndim, run_check=False))


def _identity(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch makes a whole one of every rank's piece."""
    out = kwargs["out"]
    made = torch.eye(*args, dtype=out.dtype, device=out.device)
    return out.copy_(DTensor.from_local(made, out.device_mesh, [Replicate()] * out.device_mesh.ndim, run_check=False))


def _squeezed(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In place, what C++ knows of the shape too."""
    x, *dims = args
    seen = getattr(x, op._schema.name[6:-1])(*(tuple(d) if isinstance(d, list) else d for d in dims))
    with _torch.no_dispatch():
        op(x, *dims)
    x._local_tensor, x._spec = seen._local_tensor, seen._spec
    return x


def _unscale(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """For all ranks of an axis a number is not finite where it is not on one of them and some gradient is split there."""
    grads, found, scale = args
    op([g._local_tensor if isinstance(g, DTensor) else g for g in grads], found, scale)
    split = [g for g in grads if isinstance(g, DTensor)]
    for mesh in {g.device_mesh: None for g in split}:
        along = zip(*(g.placements for g in split if g.device_mesh == mesh), strict=True)
        placed = [Replicate() if all(p.is_replicate() for p in ps) else Partial("max") for ps in along]
        found.copy_(DTensor.from_local(found, mesh, placed, run_check=False).full_tensor())


def _added(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The sum that is not added up is added up before, where the other one is a number, or a whole tensor of integers."""
    if not isinstance(args[0], torch.Tensor):
        return _scaled(op, args, kwargs)
    shares = [a for a in args if isinstance(a, DTensor) and any(p.is_partial() for p in a.placements)]
    if len(shares) != 1 or any(a is not shares[0] and isinstance(a, torch.Tensor) and a.dtype.is_floating_point for a in args):
        return NotImplemented
    added = whole.added_up(shares[0])
    return op(*(added if a is shares[0] else a for a in args), **kwargs)


def _scaled(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """To torch's cache a number is a whole tensor, and `torch.div(2, x)` is `x / 2`."""
    x, other, *rest = args
    if not isinstance(x, torch.Tensor):
        first = torch.full((), x, dtype=torch.result_type(x, other._local_tensor), device=other.device)
        return op(first, whole.added_up(other), *rest, **kwargs)
    linear = op in (aten.mul.Tensor, aten.div.Tensor)
    if isinstance(other, torch.Tensor) or all(not p.is_partial() or linear and p in (Partial(), Partial("avg")) for p in x.placements):
        return NotImplemented
    return op(whole.added_up(x), other, *rest, **kwargs)


def _written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Written in place is what the op makes of the sum."""
    x, *others = args
    linear = op in LINEAR or op in ADDS and x.is_floating_point() and isinstance(others[0], DTensor) and others[0].placements == x.placements
    if all(not p.is_partial() or linear and p in (Partial(), Partial("avg")) for p in x.placements):
        return NotImplemented
    added = whole.added_up(x)
    return _put(x, op(added, *others, **kwargs))


def _joined(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is not a sum is put together before."""
    parts, *dim = args
    norms = [isinstance(t, DTensor) and any(p.is_partial() and (type(p) is not Partial or p != Partial()) for p in t.placements) for t in parts]
    if not any(norms):
        return NotImplemented
    return op([whole.added_up(t) if norm else t for t, norm in zip(parts, norms, strict=True)], *dim, **kwargs)


def _copied(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A plain tensor is the same whole on all ranks. Of a sum that is not added up torch gives every rank a share, also of integers."""
    x, value, *how = args
    if not isinstance(value, torch.Tensor):
        return x.fill_(value)
    mesh = x.device_mesh
    if any(p.is_partial() for p in x.placements):
        value = value if isinstance(value, DTensor) else DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return _put(x, whole.added_up(value.expand(x.shape)))
    if isinstance(value, DTensor):
        return NotImplemented
    op(x._local_tensor, cut(value.expand(x.shape), x.placements, mesh.shape, mesh.get_coordinate()), *how, **kwargs)
    return x


def _masked(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A mask as large as the tensor says it element by element, so every rank writes the number into its piece."""
    x, indices, value, *accumulate = args
    mask = indices[0] if len(indices) == 1 else None
    if not isinstance(mask, DTensor) or mask.dtype != torch.bool or mask.shape != x.shape or value.numel() != 1 or any(accumulate):
        made = whole.picked(aten.index_put.default, args, kwargs)
        return made if made is NotImplemented else x.copy_(made)
    return x.masked_fill_(mask, value.item())


def _as_torch(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of what is written into slices, and where plain tensors are to be looked at only."""
    return NotImplemented


def _seen(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view in `torch.inference_mode()` of what was made outside belongs outside."""
    if not torch.is_inference_mode_enabled() or args[0].is_inference():
        return NotImplemented
    with torch.inference_mode(False), torch.no_grad():
        return op(*args, **kwargs)


def _from_the_front(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A dim that is counted from the end is another one to torch."""
    if op is aten.select_backward.default:
        grad, sizes, dim, index = args
        return op(grad, sizes, dim + len(sizes), index) if dim < 0 else NotImplemented
    x, *rest = args
    if not rest or rest[0] is None or rest[0] >= 0:
        return _seen(op, args, kwargs)
    return op(x, rest[0] + x.ndim, *rest[1:], **kwargs)


def _largest(theirs: Run, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`theirs` is torch's function, which knows no pieces that are shares of parts."""
    x = args[0]
    if any(isinstance(p, _torch.StridedShard) for p in x.placements):
        return op(x.redistribute(placements=[Replicate()] * x.device_mesh.ndim), *args[1:], **kwargs)
    made = _from_the_front(op, args, kwargs)
    return theirs(op, args, kwargs) if made is NotImplemented else made


def _one_by_one(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tensors of a list, each placed as it was."""
    to, values, *how = args
    for x, value in zip(to, values, strict=True):
        x.copy_(value, *how, **kwargs)


MENDED: dict[Run, tuple[Any, ...]] = {
    _number: (aten._local_scalar_dense.default, aten.item.default),
    drawn.drawn: drawn.OPS,
    _any: (aten.any.default, aten.any.dim, aten.any.dims),
    _in_other_ops: tuple(op.default for op in (*LOSSES, *BACKWARDS, aten.binary_cross_entropy_with_logits)),
    _norm: (aten.linalg_vector_norm.default,),
    _over_all: (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.std.correction, aten.var.correction,
                aten.logsumexp.default, aten.nansum.default),
    _mean_of_counted: (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default),
    _in_place: OUT_OF_PLACE,
    _filled: (aten.fill_.Scalar, aten.fill_.Tensor),
    _identity: (aten.eye.out, aten.eye.m_out),
    _written: IN_PLACE,
    _joined: (aten.cat.default, aten.stack.default),
    whole.on_the_whole: whole.BY_NUMBERS,
    whole.picked: (aten.index.Tensor, aten.index_put.default),
    whole.split_once: whole.READ_ONCE,
    _copied: (aten.copy_.default,),
    _masked: (aten.index_put_.default,),
    _one_by_one: (aten._foreach_copy_.default,),
    _added: (aten.add.Tensor, aten.sub.Tensor),
    _scaled: (aten.mul.Tensor, aten.div.Tensor, aten.div.Tensor_mode, aten.floor_divide.default),
    _from_the_front: (aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default, aten.select.int,
                      aten.select_backward.default),
    _seen: (*slices.SLICES, *VIEWS),
    _as_torch: (*slices.writes(), *plain.PRODUCTS, *plain.POINTWISE),
    apart: OPS,
    _squeezed: (aten.squeeze_.default, aten.squeeze_.dim, aten.squeeze_.dims, aten.unsqueeze_.default, aten.transpose_.default, aten.t_.default),
}
"""What does which ops."""
