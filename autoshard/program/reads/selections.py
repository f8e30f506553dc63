"""`x[mask]` with a mask that is data, where its rows are computed one by one, summed or put back: `F.cross_entropy(h[mask], y[mask])`,
`loss[mask].mean()`, `x[mask] = f(y[mask])`. How many rows there are is data. So all rows are computed, and those that the mask leaves out are not
counted, and not written. Where they are (`torch.where(mask)`, `mask.nonzero()`) are rows too, and indexing by all of that is indexing by the mask."""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autoshard import _torch
from autoshard.base.graph import Op, Ref
from autoshard.program.reads.places import ADDS, FINDS, READS, WRITES, added, as_index, column_of, gathered, list_of, put
from autoshard.program.reads.rows import Selection, everywhere_of, named, selections_in
from autoshard.program.tracing.known_values import Constants
from autoshard.program.tracing.survey import ReadsData, user_line
from autoshard.program.tracing.tape import checkpoint_around, is_random
from autoshard.program.tracing.ways_out import on_data

EACH = named(
    "add sub mul div true_divide neg pow square abs exp exp2 expm1 log log1p log2 log10 sqrt rsqrt reciprocal sigmoid tanh sin cos tan "
    "acos arccos asin arcsin atan arctan sinh cosh erf remainder fmod floor_divide relu relu6 gelu silu elu selu leaky_relu softplus logsigmoid sign "
    "floor ceil round clamp clip clamp_min clamp_max minimum maximum where eq ne lt le gt ge ones_like zeros_like logical_and logical_or logical_not "
    "float double half bfloat16 long int bool to type_as detach clone contiguous nan_to_num isnan isfinite __mod__ __floordiv__ "
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __rdiv__ __neg__ __pow__ __rpow__ __abs__ __eq__ __ne__ __lt__ "
    "__le__ __gt__ __ge__ __invert__ __and__ __or__ __xor__")
"""What computes every element by itself."""
UPDATES = {Tensor.add_: Tensor.add, Tensor.sub_: Tensor.sub, Tensor.mul_: Tensor.mul, Tensor.div_: Tensor.div}
"""What `x[mask] += 1` and its like do with the rows before they are written back."""
PRODUCTS = named("matmul __matmul__", Tensor, torch)
NORMS = (F.layer_norm, F.rms_norm)
"""These, a linear layer and an embedding compute every row by itself."""
DIM = {func: place for names, place in (("softmax log_softmax sum mean argmax amax amin logsumexp squeeze unsqueeze cumsum prod var std", 1),
                                        ("normalize norm vector_norm", 2)) for func in named(names, Tensor, torch, F, torch.linalg)}
"""What computes along one dim -> where that is among its arguments."""
MEANS, GROWS = named("mean"), named("unsqueeze stack")
JOINS, GATHERS = named("cat concat stack", torch), named("gather", Tensor, torch)
SIMILAR = named("cosine_similarity", torch)
"""These take several selections along a dim of rows."""
TOTALS = MEANS | named("sum")
BY_CLASS = (F.cross_entropy, F.nll_loss)
BY_WEIGHT = (F.mse_loss, F.l1_loss)
"""Their mean is one of weights."""
LOSSES = (*BY_CLASS, *BY_WEIGHT, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.kl_div)
FACTS = frozenset(getattr(Tensor, name).__get__ for name in ("dtype", "device", "requires_grad", "layout")) | named(
    "is_floating_point is_complex", Tensor, torch)
SELECTS = (Tensor.masked_select, torch.masked_select)
MADE = (READS, *SELECTS)


class Selections(TorchFunctionMode):
    """Computes with selections. What it does not know gets their rows, which a trace refuses with the user's line. `training`: whether a
    backward pass follows."""

    def __init__(self, constants: Constants, training: bool) -> None:
        super().__init__()
        self.constants, self.tape, self.training = constants, constants.tape, training

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        func, args, kwargs = *as_index(func, args), dict(kwargs or {})
        found = selections_in(args, kwargs)
        if not found and func in FINDS and len(args) == 1 and kwargs.keys() <= {"as_tuple"}:
            return self._found(func, *args, **kwargs)
        if not found:
            return self._selected(*args) if func in MADE and self._is_taken(func, *args) else func(*args, **kwargs)
        if func in FACTS:
            return func(found[0].everywhere)
        result = self._computed(func, args, kwargs, found) if self._may_compute(func, args, kwargs, found) else NotImplemented
        for one in found:
            one.is_new = one is result
        if result is NotImplemented:
            args, kwargs = as_rows((args, kwargs))
            return func(*args, **kwargs)
        return result

    def _is_taken(self, func: Any, x: Any, index: Any = None, *more: Any) -> bool:
        mask, _ = _parts(index)
        if more or not (isinstance(x, Tensor) and isinstance(mask, Tensor)) or mask.dtype is not torch.bool:
            return False
        if self.tape.phase == "backward" and checkpoint_around(sys._getframe())[0] is None:  # what an autograd.Function computes there
            return False
        fits = mask.ndim == x.ndim if func in SELECTS else 0 < mask.ndim <= x.ndim
        return fits and x.shape[:mask.ndim] == mask.shape and self.constants.value_of(mask) is None

    def _selected(self, x: Tensor, index: Any) -> Tensor:
        mask, rest = _parts(index)
        left_out = ~mask
        key = self.tape.find(_torch.from_fun(left_out))
        if key is None:
            return x[index]
        made = Selection.of(x, left_out, key, user_line(), is_new=True)
        at = _of_each_row((slice(None), *rest), made) if rest else ()
        return x[index] if at is None else made.of_same(made.everywhere[at]) if at else made

    def _found(self, func: Any, x: Tensor, **as_tuple: bool) -> Any:
        """Where a mask holds, as `torch.where(mask)` and `mask.nonzero()` tell."""
        mask = x if x.dtype is torch.bool else x != 0
        key = self.tape.find(_torch.from_fun(left_out := ~mask)) if self._is_taken(None, mask, mask) else None
        if key is None:
            return func(x, **as_tuple)
        rows = Selection.of(left_out, left_out, key, user_line())
        columns = tuple(map(rows.where, range(mask.ndim)))
        if func is torch.where or as_tuple.get("as_tuple"):
            return columns
        made = rows.of_same(torch.stack([c.everywhere for c in columns], -1))
        made.found = tuple(range(mask.ndim))
        return made

    def _may_compute(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], found: Sequence[Selection]) -> bool:
        """Whether the selections are of one mask. A result of an autograd.Function has a gradient that what is computed here would not pass on."""
        if kwargs.get("out") is not None or kwargs.get("inplace") or func in EACH and any(a is True for a in args):
            return False
        given = [t for t in (*everywhere_of((*args, *found)), *everywhere_of(kwargs.values())) if isinstance(t, Tensor)]
        hides = any(s.requires_grad for s in found) or self.training and not torch.is_grad_enabled() and any(t.requires_grad for t in given)
        return not hides and all(self._is_same(found[0].key, s.key) for s in found[1:])

    def _is_same(self, a: Ref, b: Ref) -> bool:
        """Whether two values are made by equal ops."""
        ops = {op.name: op for op in self.tape.ops if op.name} if a != b else {}
        return _are_equal(a, b, ops)

    def _computed(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], found: Sequence[Selection]) -> Any:
        first = found[0]
        if func is WRITES:
            return self._written(*args)
        if func is READS and not isinstance(args[0], Selection):
            return self._gathered(*args)
        if func in ADDS and len(args) == 4 and not kwargs and not isinstance(args[0], Selection):
            total = added(*args)
            return args[0].copy_(total) if func is Tensor.index_add_ and total is not NotImplemented else total
        if func in LOSSES:
            return _loss(func, args, kwargs)
        if func in JOINS or func in GATHERS:
            return _of_several(func, first, args, kwargs)
        if func in SIMILAR:
            return _similar(func, first, args, kwargs)
        alone = bool(args) and args[0] is first and len(found) == 1
        if alone and (column := column_of(func, first, args[1:], kwargs)) is not None:
            return column
        if alone and _is_by_row(func, first.dims_of(), args, kwargs):
            return first.of_same(func(first.everywhere, *args[1:], **kwargs))
        if func is READS and alone and (index := _of_each_row(args[1], first)) is not None:
            return first.of_same(first.everywhere[index])
        if func in UPDATES:
            return _updated(UPDATES[func], args, kwargs)
        if func in EACH and len({s.dims_of() for s in found}) == 1 and _broadcasts(args, kwargs, first.dims_of()):
            result = _each(func, args, kwargs)
            of_rows = isinstance(result, Tensor) and result.ndim == first.everywhere.ndim  # not what only took a dtype, as in w.to(x[mask])
            return first.of_same(result) if of_rows else NotImplemented
        return _along(func, first, args, kwargs) if func in DIM and alone else NotImplemented

    def _gathered(self, x: Tensor, index: Any) -> Any:
        lists, rest = list_of(index)
        at = _of_each_row((slice(None), *rest), made := gathered(x, lists)) if lists else None
        return NotImplemented if at is None else made.of_same(made.everywhere[at]) if rest else made

    def _written(self, x: Tensor, index: Any, value: Any) -> Any:
        """`x[mask] = value`."""
        mask, rest = _parts(index)
        if isinstance(mask, Selection):
            lists, rest = list_of(index)
            if not lists or not _are_basic(rest):
                return NotImplemented
            return put(x[(*(slice(None),) * len(lists), *rest)] if rest else x, lists, value)
        if not isinstance(value, Selection) or isinstance(x, Selection) or rest or not self._is_taken(None, x, mask):
            return NotImplemented
        key = self.tape.find(_torch.from_fun(~mask))
        if key is None or not self._is_same(key, value.key) or x.shape[mask.ndim:] != value.everywhere.shape[mask.ndim:]:
            return NotImplemented
        x.copy_(torch.where(value.places(x), x, value.everywhere.to(x.dtype)))
        return None


def as_rows(value: Any) -> Any:
    """`value` for what needs the rows of selections."""
    return _torch.pytree.tree_map(lambda v: v.rows() if isinstance(v, Selection) else v, value)


def returned(value: Any) -> Any:
    """What a model returns, or makes its buffer: the error names the line that selects, since none of the user's code runs any more."""
    found = next((v for v in _torch.pytree.tree_leaves(value) if isinstance(v, Selection)), None)
    try:
        return value if found is None else as_rows(value)
    except _torch.DATA_DEPENDENT:
        raise ReadsData(on_data("forward", found.line, torch.ops.aten.nonzero.default)) from None


def _are_equal(a: Any, b: Any, ops: Mapping[str, Op]) -> bool:
    todo, compared = [(a, b)], set()
    while todo:
        a, b = todo.pop()
        if a == b:
            continue
        if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
            todo += zip(a, b, strict=True)
        elif not (isinstance(a, Ref) and isinstance(b, Ref)):
            return False
        elif (a, b) not in compared:  # once, since ops share what they read
            compared.add((a, b))
            one, other = ops[a.op], ops[b.op]
            if not (one.kind == other.kind == "call" and one.target == other.target and a.index == b.index) or is_random(one.target):
                return False
            todo += ((one.args, other.args), (one.kwargs, other.kwargs))
    return True


def _parts(index: Any) -> tuple[Any, tuple[Any, ...]]:
    """What `x[mask]`, `x[mask, ...]` or `x[mask, 0]` index by: the first dims, and each row."""
    first, *rest = index if isinstance(index, tuple) and index else (index,)
    all_of_row = all(part is Ellipsis or isinstance(part, slice) and part == slice(None) for part in rest)
    return first, () if all_of_row else tuple(rest)


def _of_each_row(index: Any, x: Selection) -> tuple[Any, ...] | None:
    """Of `x[:, 0]` or `x[..., :2]`, which take the same of every row, the index for all rows."""
    first, *rest = index if isinstance(index, tuple) and index else (None,)
    of_row = _are_basic(rest) and sum(part is not None for part in rest) <= x.dims_of()
    if not of_row or not (first is Ellipsis or isinstance(first, slice) and first == slice(None)):
        return None
    return (first, *rest) if first is Ellipsis else (*(slice(None),) * x.left_out.ndim, *rest)


def _are_basic(index: Iterable[Any]) -> bool:
    return all(part is None or type(part) in (int, slice) for part in index)


def _is_by_row(func: Any, dims: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a row of the result is made of one row of `dims` dims. (A table whose rows are normed as they are
    read is written; one may count how often a row is read, or which rows are.)"""
    if func in NORMS:  # ones have no variance to divide by
        return len(args[1]) <= dims and kwargs.get("eps") != 0
    if func is F.embedding:
        return kwargs.get("max_norm") is None and not kwargs.get("scale_grad_by_freq") and not kwargs.get("sparse")
    return dims > 0 and (func is F.linear or func in PRODUCTS and args[1].ndim in (1, 2))


def _along(func: Any, x: Selection, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Along a dim of rows, or over all rows."""
    place = DIM[func]
    default = 1 if func is F.normalize else None
    dim = kwargs.get("dim", args[place] if len(args) > place else default)
    if (at := _dim_of_all(func, x, dim)) is not None:
        if len(args) > place:
            return x.of_same(func(x.everywhere, *args[1:place], at, *args[place + 1:], **kwargs))
        return x.of_same(func(x.everywhere, *args[1:], **{**kwargs, "dim": at}))
    if func in TOTALS and dim in (None, 0) and len(args) <= place + 1 and kwargs.keys() <= {"dim"}:
        return _total(x, func in MEANS, None if dim is None else range(x.left_out.ndim))
    return NotImplemented


def _dim_of_all(func: Any, x: Selection, dim: Any) -> int | None:
    """Of a dim of rows, the one of all rows; None for the dim along which the rows lie."""
    of_row = type(dim) is int and (dim > 0 or 0 < -dim <= x.dims_of() + (func in GROWS))
    return None if not of_row else dim if dim < 0 else dim + x.left_out.ndim - 1


def _of_several(func: Any, x: Selection, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Rows side by side, and of each row what another one names."""
    given = {**dict(zip(("tensors", "dim") if func in JOINS else ("input", "dim", "index"), args, strict=False)), **kwargs}
    at = _dim_of_all(func, x, given.pop("dim", 0))
    parts = given.pop("tensors") if given.keys() == {"tensors"} else [given.pop(name, None) for name in ("input", "index")]
    if at is None or given or not all(isinstance(p, Selection) and p.dims_of() == x.dims_of() for p in parts):
        return NotImplemented
    everywhere = everywhere_of(parts)
    return x.of_same(func(everywhere, at) if func in JOINS else func(everywhere[0], at, everywhere[1]))


def _similar(func: Any, x: Selection, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Of each row how similar another one of the same place is."""
    given = {**dict(zip(("x1", "x2", "dim", "eps"), args, strict=False)), **kwargs}
    at, pair = _dim_of_all(func, x, given.pop("dim", 1)), [given.pop(name, None) for name in ("x1", "x2")]
    if at is None or given.keys() - {"eps"} or not all(isinstance(p, Selection) and p.dims_of() == x.dims_of() for p in pair):
        return NotImplemented
    return x.of_same(func(*(p.filled(p.everywhere, 1) for p in pair), dim=at, **given))


def _broadcasts(args: Sequence[Any], kwargs: Mapping[str, Any], dims: int) -> bool:
    """Whether the other tensors are the same for all rows."""
    others = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and not isinstance(t, Selection)]
    return all(t.ndim <= dims for t in others)


def _each(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """With ones in all that is left out: to divide by zeros of integers gives weights gradients that are not finite."""
    def given(value: Any) -> Any:
        return value.filled(value.everywhere, 1) if isinstance(value, Selection) else value

    return func(*map(given, args), **{name: given(value) for name, value in kwargs.items()})


def _updated(func: Callable[..., Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`x[mask] += other`, of rows that nothing else has."""
    x, dims = args[0], {s.dims_of() for s in selections_in(args, kwargs)}
    if not isinstance(x, Selection) or not x.is_new or len(dims) > 1 or not _broadcasts(args, kwargs, x.dims_of()):
        return NotImplemented
    result = _each(func, args, kwargs)
    if result.dtype != x.everywhere.dtype or result.shape != x.everywhere.shape:
        return NotImplemented
    x.everywhere = x.of_same(result).everywhere
    return x


def _total(x: Selection, is_mean: bool, dims: Iterable[int] | None) -> Tensor:
    """Over all rows, and over all of their elements where no `dims` are given."""
    value = x.filled(x.everywhere, 0)
    if not is_mean:
        return value.sum() if dims is None else value.sum(tuple(dims))
    counted = ~(x.left_out if dims is not None else x.places(value).expand_as(value))
    wide = torch.promote_types(value.dtype, torch.float32)  # a sum and a count may be too large for a half, which their quotient is not
    total = value.sum(dtype=wide) if dims is None else value.sum(tuple(dims), dtype=wide)
    return (total / counted.sum()).to(value.dtype)


def _loss(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Of rows of an input and of a target."""
    if len(args) != 2 or not all(isinstance(a, Selection) for a in args) or any(kwargs.get(k) is not None for k in ("size_average", "reduce")):
        return NotImplemented
    given, target, reduction = *args, kwargs.get("reduction", "mean")
    if func in BY_CLASS:
        if selections_in((), kwargs) or given.dims_of() != 1 or target.dims_of() != 0 or target.everywhere.is_floating_point():
            return NotImplemented
        options = {name: value for name, value in kwargs.items() if name != "reduction"}
        classes = target.filled(target.everywhere, kwargs.get("ignore_index", -100)).flatten()
        loss = func(given.everywhere.flatten(0, -2), classes, reduction=reduction, **options)
        return given.of_same(loss.view(given.left_out.shape)) if reduction == "none" else loss
    if given.everywhere.shape != target.everywhere.shape or not _broadcasts((), kwargs, given.dims_of()):
        return NotImplemented
    weight = kwargs.get("weight")
    options = {**dict(zip(kwargs, everywhere_of(kwargs.values()), strict=True)), "reduction": "none"}
    each = given.of_same(func(*everywhere_of(args), **options))
    if func in BY_WEIGHT and weight is not None and reduction == "mean":
        return _total(each, False, None) / _total(weight, False, None)
    if reduction == "batchmean":
        return _total(each, False, None) / (~each.left_out).sum()
    return each if reduction == "none" else _total(each, reduction == "mean", None)
