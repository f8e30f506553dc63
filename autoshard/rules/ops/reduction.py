"""Reductions over dims given as arguments. Sums, means and maxima of a sharded dim are Partial; whatever
does not split into independent parts (argmax, variance, norms) keeps its reduced dims whole."""
from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from autoshard.base.graph import Call
from autoshard.rules.family import Family
from autoshard.rules.notation import rule
from autoshard.rules.ops.view import dims, listed
from autoshard.rules.types import LocalContext, Rule

aten = torch.ops.aten


def _chosen(call: Call) -> set[int]:
    """Dims the op works along; all when the argument is missing, None or empty."""
    ndim = len(call.inputs[0].shape)
    return {d % max(ndim, 1) for d in listed(call.argument("dim"))} or set(range(ndim))


def _reduced(whole: bool) -> Callable[[Call], str]:
    def text(call: Call) -> str:
        d, chosen = dims(call.inputs[0]), _chosen(call)
        left = [x + "!" if whole and i in chosen else x for i, x in enumerate(d)]
        keep = call.argument("keepdim", False)
        right = " ".join("1" if i in chosen else x for i, x in enumerate(d) if keep or i not in chosen)
        return f"{' '.join(left)} -> {', '.join([right] * len(call.outputs))}"
    return text


def _along(call: Call) -> str:
    """Same shape out; the dim the op runs along stays whole."""
    d, chosen = dims(call.inputs[0]), _chosen(call)
    marked = " ".join(x + "!" if i in chosen else x for i, x in enumerate(d))
    return f"{marked} -> {', '.join([marked] * len(call.outputs))}"


def _mean(ctx: LocalContext, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Every rank divides by the global count, so that the parts sum to the mean."""
    y = ctx.call.target(x, *args, **kwargs)
    chosen = _chosen(ctx.call)
    local, whole = (prod(shape[d] for d in chosen) for shape in (ctx.local_in(0), ctx.call.inputs[0].shape))
    return y if local == whole else aten.mul.Scalar(y, local / whole)


def _family(text: Callable[[Call], str], **options: Any) -> Rule:
    return rule(text, family=Family.REDUCTION, **options)


_sum = _family(_reduced(whole=False), partial="each")
_average = _family(_reduced(whole=False), partial="each", local=_mean)
_max = _family(_reduced(whole=False), reduce="max")
_min = _family(_reduced(whole=False), reduce="min")
_inseparable = _family(_reduced(whole=True))
_scan = _family(_along)

RULES = {
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mean.default: _average,
    aten.mean.dim: _average,
    aten.amax.default: _max,
    aten.max.default: _max,
    aten.amin.default: _min,
    aten.min.default: _min,
    aten.cumsum.default: _family(_along, partial="each"),
    aten.cumprod.default: _scan,
    aten.logcumsumexp.default: _scan,
    **dict.fromkeys((
        aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default, aten.aminmax.default, aten.any.default,
        aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims, aten.prod.default,
        aten.prod.dim_int, aten.logsumexp.default, aten.linalg_vector_norm.default, aten.norm.Scalar,
        aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype, aten.nansum.default, aten.var.correction, aten.var.dim,
        aten.var_mean.correction, aten.var_mean.dim, aten.std.correction, aten.std.dim, aten.std_mean.correction,
        aten.median.dim, aten.mode.default, aten.kthvalue.default, aten.nanmedian.dim,
    ), _inseparable),
}
