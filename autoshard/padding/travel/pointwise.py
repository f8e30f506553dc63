"""Ops on one element at a time. Where all operands are numbers behind a dim, the op itself says what it makes of them."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any

import torch

from autoshard.base.graph import Slot, map_args
from autoshard.padding.site import Outcome, Site
from autoshard.padding.values import ANY, FINITE, Fill, Pad, Value, is_finite, joint
from autoshard.program.tracing.tape import is_random
from autoshard.rules.ops import pointwise

aten = torch.ops.aten

_FINITE = (
    "abs add sub rsub mul neg relu gelu silu sigmoid tanh erf sin cos atan sign clamp clamp_min clamp_max maximum minimum where masked_fill "
    "_to_copy clone softplus hardtanh leaky_relu elu mish hardswish hardsigmoid log_sigmoid_forward floor ceil round trunc lt le gt ge eq ne "
    "logical_not logical_and logical_or bitwise_not bitwise_and bitwise_or addcmul lerp square").split()
"""They make finite numbers of finite ones."""
_ABSORBS = ("mul", "div", *(name for name in pointwise.BACKWARDS))
"""Zero as the first operand gives zero, whatever the others are, if finite."""


def name_of(target: Any) -> str:
    return str(target).removeprefix("aten.").split(".")[0]


def is_pointwise(target: Any) -> bool:
    tagged = torch.Tag.pointwise in getattr(target, "tags", ()) or target in pointwise.RULES and name_of(target) not in ("glu", "glu_backward")
    return tagged and not is_random(target)


def elementwise(site: Site) -> Outcome | None:
    """Operands aligned from the right; those that are as long as the true dim are lengthened."""
    values, ndim = list(site.values), max(len(v.shape) for v in site.values)
    if any(m is not None and len(m.shape) != ndim for m in site.call.outputs):
        return None
    pads: dict[int, Pad] = {}
    for dim in range(ndim):
        at = [dim - ndim + len(v.shape) for v in values]
        found = [v.pads[d] for v, d in zip(values, at, strict=True) if d in v.pads]
        if found:
            values = [site.lengthened(v, d, found[0]) if d >= 0 else v for v, d in zip(values, at, strict=True)]
            pads[dim] = found[0]
    outputs = [{dim: _behind(site, values, dim - ndim, i) for dim in pads} for i in range(len(site.call.outputs))]
    casts = name_of(site.op.target) in ("_to_copy", "clone")
    return Outcome(values, outputs, stays={d: d for d in pads} if casts else {})


def _behind(site: Site, values: Sequence[Value], dim: int, output: int) -> Pad:
    """The pad of a dim (counted from the right) of an output."""
    held = [v.pads.get(dim + len(v.shape)) for v in values]
    there = [p for p in held if p is not None]
    sources = frozenset().union(*(p.sources for p in there))
    return Pad(there[0].true, there[0].length, _fill(site, values, held, output), sources)


def _fill(site: Site, values: Sequence[Value], pads: Sequence[Pad | None], output: int) -> Fill:
    """`pads` of the operands: None for one that broadcasts along the dim, whose numbers are true ones."""
    name, fills = name_of(site.op.target), [FINITE if p is None else p.fill for p in pads]
    if all(p is not None and not isinstance(p.fill, str) for p in pads):
        return _computed(site, values, fills, output)
    zero = [f == 0.0 for f in fills]
    others_finite = all(is_finite(f) for f in fills)
    if name == "where" and len(fills) == 3:
        return joint(*fills[1:]) if isinstance(fills[0], str) else fills[1] if fills[0] else fills[2]
    if name == "masked_fill":
        value = site.call.argument("value")
        return joint(fills[0], fills[2] if isinstance(value, Slot) else float(value))
    if others_finite and (name == "mul" and any(zero) or name in _ABSORBS and zero[0]):
        return 0.0
    return FINITE if others_finite and (name in _FINITE or _is_power(site, name)) else ANY


def _is_power(site: Site, name: str) -> bool:
    """x^n with a whole n, not negative."""
    exponent = site.call.argument("exponent") if name == "pow" else None
    return isinstance(exponent, (int, float)) and exponent >= 0 and exponent == int(exponent)


def _computed(site: Site, values: Sequence[Value], fills: Sequence[Fill], output: int) -> Fill:
    ones = [torch.full((1,), f).to(v.dtype) for v, f in zip(values, fills, strict=True)]
    call = site.call

    def given(leaf: Any) -> Any:
        return ones[leaf.index] if isinstance(leaf, Slot) else leaf

    result = call.target(*map_args(given, call.args), **{k: map_args(given, v) for k, v in call.kwargs})
    number = float((result[output] if isinstance(result, (tuple, list)) else result).double())
    return ANY if isnan(number) or number == float("inf") else number


def dropout(site: Site) -> Outcome:
    """Zeros stay zeros; what is drawn for the pad is drawn for nothing."""
    (value,) = site.values
    kept: Mapping[int, Pad] = {d: p if p.fill == 0.0 else p.filled(FINITE if is_finite(p.fill) else ANY) for d, p in value.pads.items()}
    return Outcome([value], [kept if i == 0 else {d: p.filled(FINITE) for d, p in kept.items()} for i in range(len(site.op.outputs))])


TRAVELS = {aten.native_dropout.default: dropout}
