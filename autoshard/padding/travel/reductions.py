"""Reductions: the pad is filled with what does not count, and a mean divides by the true number."""
from __future__ import annotations

from math import prod
from typing import Any

import torch

from autoshard.padding.site import Outcome, Site
from autoshard.padding.values import ANY, FINITE, LOWEST, Pad, Value, is_finite
from autoshard.rules.ops.view import listed

aten = torch.ops.aten


def total(site: Site) -> Outcome:
    """Zeros add nothing."""
    value = _neutral(site, 0.0)
    return Outcome([value], [{d: p if p.fill == 0.0 else p.filled(FINITE if is_finite(p.fill) else ANY) for d, p in _left(site, value).items()}])


def mean(site: Site) -> Outcome | None:
    """The sum, over the true number."""
    value, along = _neutral(site, 0.0), _along(site)
    if not along & set(value.pads):
        return total(site)
    (old,), (meta,) = site.call.inputs, site.op.outputs
    assert meta is not None, f"{site.op.name} makes nothing"
    count = prod(old.shape[d] for d in along)
    scaled = site.emit(f"over{count}", aten.div.Scalar, value, dict(value.pads), value.shape, count)
    pads = {d: p if p.fill == 0.0 else p.filled(FINITE if is_finite(p.fill) else ANY) for d, p in _left(site, scaled).items()}
    kwargs: dict[str, Any] = {"dtype": meta.dtype} if meta.dtype != old.dtype else {}
    return Outcome([scaled], [pads], aten.sum.dim_IntList, (scaled.ref, tuple(sorted(along)), bool(site.call.argument("keepdim", False))), kwargs)


def largest(site: Site) -> Outcome | None:
    """The lowest number is never the largest, nor its position that of the largest."""
    if not site.values[0].dtype.is_floating_point or site.call.argument("dim") is None and "arg" in str(site.op.target):
        return None  # of all dims at once the position would count the pad
    value = _neutral(site, LOWEST)
    return Outcome([value], [{d: p.filled(FINITE if is_finite(p.fill) else ANY) for d, p in _left(site, value).items()} for _ in site.op.outputs])


def _neutral(site: Site, fill: float) -> Value:
    (value,) = site.values
    for d in _along(site) & set(value.pads):
        value = site.filled(value, d, fill)
    return value


def _along(site: Site) -> set[int]:
    """Dims that are reduced: all where none is named."""
    ndim = len(site.values[0].shape)
    return {d % max(ndim, 1) for d in listed(site.call.argument("dim"))} or set(range(ndim))


def _left(site: Site, value: Value) -> dict[int, Pad]:
    """Pads of the result's dims."""
    along, keep = _along(site), site.call.argument("keepdim", False)
    return {d if keep else d - sum(r < d for r in along): p for d, p in value.pads.items() if d not in along}


TRAVELS = {
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList), total),
    **dict.fromkeys((aten.mean.default, aten.mean.dim), mean),
    **dict.fromkeys((aten.amax.default, aten.max.default, aten.max.dim, aten.argmax.default), largest),
}
