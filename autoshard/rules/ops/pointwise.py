"""Elementwise ops with broadcasting. Every op torch tags as pointwise has the rule of `tagged`; the table
adds what the tag does not say: which ops are linear, so that Partial sums pass."""
from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import isinf
from typing import Any

import torch

from autoshard.base.graph import Call
from autoshard.rules.family import Family
from autoshard.rules.notation import Passes, rule
from autoshard.rules.types import Rule

aten = torch.ops.aten


@cache
def tagged(target: Any) -> Rule:
    """The rule of an op of which only the pointwise tag is known: any dim, no Partial."""
    tensors = sum("Tensor" in str(a.type) for a in target._schema.arguments)
    outputs = len(target._schema.returns)
    return rule(", ".join(["..."] * tensors) + " -> " + ", ".join(["..."] * outputs))


def _linear(text: str | Callable[[Call], str]) -> Rule:
    return rule(text, partial="each")


def _keeps_precision(call: Call) -> Passes:
    """Partial sums may be cast to the same or a wider float, never to a narrower one: each rank would
    round its own part. Floats of a byte are added up by no op, and torch promotes none."""
    old, new = call.inputs[0].dtype, call.output().dtype
    if any(dtype.is_floating_point and dtype.itemsize == 1 for dtype in (old, new)):
        return "none"
    return "each" if new == old or torch.promote_types(old, new) == new else "none"


def _fills_additive(call: Call) -> Passes:
    """0 and infinities are what their own copies add up to."""
    value = call.argument("value")
    return "each" if value == 0 or isinf(value) else "none"


def _halved(term: str) -> Callable[[Call], str]:
    """The dim that holds both halves stays whole."""
    def line(call: Call) -> str:
        n = len(call.inputs[0].shape)
        at = call.argument("dim") % n
        both, half = (" ".join(f"{word}!" if d == at else f"x{d}" for d in range(n)) for word in ("both", "half"))
        return term.format(both=both, half=half)
    return line


def _log_sigmoid_line(call: Call) -> str:
    """The buffer that backward reads has the input's shape on CPUs, and is empty elsewhere."""
    return f"... -> ..., {'...' if call.output(1).shape == call.inputs[0].shape else 'empty!'}"


_cast = rule("... -> ...", partial=_keeps_precision, family=Family.COPY)
_sum = _linear("... + ... -> ...")
_product = _linear("..., ... -> ...")
_quotient = _linear("..., ~... -> ...")
_identity = _linear("... -> ...")
_fill = rule("..., ~... -> ...", partial=_fills_additive)

# op(gradient, what forward saved): linear in the gradient only
BACKWARDS = (
    "threshold_backward", "gelu_backward", "silu_backward", "tanh_backward", "sigmoid_backward", "elu_backward",
    "hardtanh_backward", "hardswish_backward", "hardsigmoid_backward", "leaky_relu_backward", "softplus_backward",
    "mish_backward", "native_dropout_backward", "log_sigmoid_backward", "logit_backward", "rrelu_with_noise_backward",
)


def _backward_rules() -> dict[Any, Rule]:
    out = {}
    for name in BACKWARDS:
        op = getattr(aten, name).default
        saved = sum("Tensor" in str(a.type) for a in op._schema.arguments) - 1
        out[op] = _linear("..., " + ", ".join(["~..."] * saved) + " -> ...")
    return out


RULES = {
    aten.add.Tensor: _sum,
    aten.sub.Tensor: _sum,
    aten.rsub.Tensor: _sum,
    aten.mul.Tensor: _product,
    aten.mul.Scalar: _identity,
    aten.div.Tensor: _quotient,
    aten.div.Scalar: _identity,
    aten.neg.default: _identity,
    aten.positive.default: _identity,
    aten.real.default: _identity,
    aten.imag.default: _identity,
    aten._conj.default: _identity,
    aten.conj_physical.default: _identity,
    aten.where.self: _linear("~..., ... + ... -> ..."),
    aten.addcmul.default: _linear("... + ..., ... -> ..."),
    aten.addcdiv.default: _linear("... + ..., ~... -> ..."),
    aten.lerp.Scalar: _sum,
    aten.masked_fill.Scalar: _fill,
    aten.masked_fill.Tensor: _linear("..., ~... + ... -> ..."),
    aten.clone.default: rule("... -> ...", partial="each", family=Family.COPY),
    aten._to_copy.default: _cast,
    aten.copy.default: rule("~..., ... -> ...", partial="each", family=Family.COPY),
    aten.lift_fresh_copy.default: rule("... -> ...", partial="each", family=Family.COPY),
    aten.complex.default: _sum,
    aten.polar.default: _quotient,
    aten.hardswish.default: rule("... -> ..."),
    aten.log_sigmoid_forward.default: rule(_log_sigmoid_line),
    aten._prelu_kernel.default: rule("..., ... -> ..."),
    aten._prelu_kernel_backward.default: _linear("..., ~..., ~... -> ..., ..."),
    aten.glu.default: rule(_halved("{both} -> {half}")),
    aten.glu_backward.default: _linear(_halved("{half}, ~{both} -> {both}")),
    aten.floor_divide.default: rule("..., ... -> ..."),
    **_backward_rules(),
}
