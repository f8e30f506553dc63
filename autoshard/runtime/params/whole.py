"""Ops of DTensors that torch has no way to do on pieces, done on the whole tensors, which every rank gathers.

Training loops call ops for which torch 2.13 knows no placements (`torch.quantile`, `renorm`), views that merge or part a dim whose pieces are not
equally long (`p.flatten()`), and ops whose results are as large as the numbers say (`p[mask]`, `torch.unique`). torch refuses all of them.

Ops that write in place, or draw random numbers, which may be other ones on every rank, stay refused."""
from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from autoshard import _torch
from autoshard.runtime.params.told import told_if_alone

log = logging.getLogger("autoshard")
aten = torch.ops.aten
BY_NUMBERS = (aten.masked_select.default, aten.nonzero.default, aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default,
              aten.bincount.default, aten.linalg_lstsq.default, aten.equal.default, aten.allclose.default)
"""Ops whose result only the numbers tell. `equal` is one of torch's, which asks all ranks, those of other meshes too."""
READ_ONCE = (aten.gather.default, aten.embedding.default, aten.index_select.default)
"""Ops of ids. Along a dim that is split every rank picks what it has."""


def done_on_the_whole(theirs: Callable[..., Any], propagator: Any) -> Callable[..., Any]:
    """torch's function for placements, a method of `propagator`, and where it has none for a call with the right shapes, whole tensors."""
    by_others = propagator.decomp_strategy  # finds placements for an op that others make up
    found_so = by_others._get_candidate_placements  # as sets lie, other ones on every rank: they choose otherwise then, and wait for each other
    by_others._get_candidate_placements = lambda schema: sorted(found_so(schema), key=str)

    def placed(schema: Any) -> Any:
        op = schema.op
        try:
            found = theirs(schema)
        except (RuntimeError, AssertionError, ValueError, LookupError):
            named = _torch.pytree.tree_leaves(schema.kwargs_schema)
            split = any(not p.is_replicate() for given in named for p in getattr(given, "placements", ()))
            if split or op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags or op._can_decompose():
                raise
            return _whole(schema, propagator)
        if op._schema.name.endswith("_") and _is_moved(schema.args_schema[0], found.output_spec):
            raise RuntimeError(f"{op} writes in place, and torch would have the result lie otherwise than the tensor does")  # it would only say so
        return found

    return placed


def _is_moved(before: Any, after: Any) -> bool:
    return hasattr(before, "placements") and hasattr(after, "placements") and before.shape == after.shape and before.placements != after.placements


def _whole(schema: Any, propagator: Any) -> Any:
    """The answer for a call of an op that takes and gives whole tensors. Raises what the op does for wrong shapes."""
    def placed(meta: Any) -> Any:
        return _torch.DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)

    mesh = next(s.mesh for s in _torch.pytree.tree_leaves(schema.args_schema) if isinstance(s, _torch.DTensorSpec))
    propagator.decomp_strategy.ensure_schema_info(schema.op)  # numbers among the arguments count for torch's cache
    taken = _torch.pytree.tree_map_only(_torch.DTensorSpec, lambda spec: placed(spec.tensor_meta), schema.args_schema)
    made = propagator._propagate_tensor_meta_non_cached(schema)
    given = _torch.pytree.tree_map(placed, made, is_leaf=lambda meta: meta is None or isinstance(meta, _torch.TensorMeta))
    return _torch.OutputSharding(given, _torch.OpSchema(schema.op, taken, schema.kwargs_schema), needs_redistribute=True)


def values(arguments: Any) -> Any:
    """Arguments with whole plain tensors in place of DTensors. Every rank calls this."""
    with told_if_alone("gather a DTensor"):
        return _torch.pytree.tree_map_only(DTensor, DTensor.full_tensor, arguments)


def on_the_whole(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mesh = next(t.device_mesh for t in _torch.pytree.tree_leaves((args, kwargs)) if isinstance(t, DTensor))
    whole, made = [Replicate()] * mesh.ndim, op(*values(args), **values(kwargs))
    return _torch.pytree.tree_map_only(torch.Tensor, lambda t: DTensor.from_local(t, mesh, whole, run_check=False), made)


def picked(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """How many a mask picks only its numbers tell."""
    masks = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return on_the_whole(op, args, kwargs) if masks else NotImplemented


def split_once(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows that ids pick of a table. torch knows which rows a rank has for one mesh axis at a time."""
    x, *rest = args
    dim = 0 if op is aten.embedding.default or not isinstance(x, DTensor) else rest[0] % x.ndim
    axes = [i for i, p in enumerate(x.placements) if p.is_shard(dim)][1:] if isinstance(x, DTensor) else []
    if not axes:
        return NotImplemented
    return op(x.redistribute(placements=[Replicate() if i in axes else p for i, p in enumerate(x.placements)]), *rest, **kwargs)


def added_up(t: DTensor) -> DTensor:
    """Where it is a sum over ranks, every rank has the sum."""
    return t.redistribute(placements=[Replicate() if p.is_partial() else p for p in t.placements])


def picks_added_up(t: Any) -> Any:
    """What ids pick, whole: torch's sum that is not added up yet forgets, when it is read first, which rows it has."""
    return added_up(t) if any(hasattr(p, "mask_buffer") for p in t.placements) else t


def give_lists() -> None:
    """`tolist()`, `numpy()`, `f"{loss:.3f}"` and `torch.tensor([loss])` of DTensors, which torch refuses: those of the whole tensor. Every rank
    calls them."""
    for name in ("__float__", "__int__", "__index__", "__bool__"):
        if name not in vars(DTensor):
            setattr(DTensor, name, _number_by(getattr(torch.Tensor, name)))
    for name in ("tolist", "numpy"):
        if name not in vars(DTensor):
            setattr(DTensor, name, lambda x, *args, _named=name, **kwargs: getattr(values(x), _named)(*args, **kwargs))
    if "__format__" not in vars(DTensor):
        DTensor.__format__ = _formatted  # type: ignore[method-assign]
    if "__reduce_ex__" not in vars(DTensor):
        DTensor.__reduce_ex__ = _pickled  # type: ignore[method-assign]


def _number_by(theirs: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def number(x: Any) -> Any:
        with _torch.dispatched_by(*_torch.KEYS):
            return theirs(x.detach())

    return number


def _formatted(x: DTensor, how: str) -> str:
    return format(x.item(), how) if how and x.ndim == 0 else object.__format__(x, how)


def _pickled(x: DTensor, protocol: Any) -> Any:
    if not all(p.is_replicate() for p in x.placements):
        _warn_of_pieces()
    return torch.Tensor.__reduce_ex__(x, protocol)


@cache
def _warn_of_pieces() -> None:
    log.warning("torch.save (pickle) of a split DTensor writes this rank's piece alone: a file of one rank has not the whole weights. Save whole "
                "tensors (get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)) on every rank, torch.save "
                "on the first), or pieces with torch.distributed.checkpoint")
