"""Layer and RMS norm of more rows than there are: a row of the pad has a norm of its own."""
from __future__ import annotations

import torch

from autoshard.padding.site import Outcome, Site
from autoshard.padding.values import ANY, FINITE, Value, is_finite
from autoshard.rules.ops.rms_norm import RMS_NORM, RMS_NORM_BACKWARD

aten = torch.ops.aten


def forward(site: Site) -> Outcome:
    values = [site.cut(v, _normed(site, v, i > 0)) for i, v in enumerate(site.values)]
    x = values[0]
    finite = site.call.argument("eps") != 0.0  # a row of zeros over a deviation of zero
    pads = {d: p.filled(FINITE if finite and is_finite(p.fill) else ANY) for d, p in x.pads.items()}
    return Outcome(values, [pads for _ in site.op.outputs])


def backward(site: Site) -> Outcome:
    """A row whose gradient is zero adds nothing to those of weight and bias."""
    grad, x, *others = (site.cut(v, _normed(site, v, len(v.shape) < len(site.values[0].shape))) for v in site.values)
    rows = [grad, x, *(v for v in others if len(v.shape) == len(x.shape))]
    for dim in sorted(set().union(*(v.pads for v in rows))):
        pad = next(v.pads[dim] for v in rows if dim in v.pads)
        rows = [site.lengthened(v, dim, pad) for v in rows]
    grad, *saved = rows
    for dim in list(grad.pads):
        grad = site.filled(grad, dim, 0.0)
    values = [grad, *(site.finite(v) for v in saved), *others[len(saved) - 1:]]
    return Outcome(values, [{d: p.filled(0.0) for d, p in grad.pads.items()} if i == 0 and m is not None else {}
                            for i, m in enumerate(site.op.outputs)])


def _normed(site: Site, value: Value, is_vector: bool) -> list[int]:
    """The dims that are normalised: all of a weight or bias."""
    lead = 0 if is_vector else len(value.shape) - len(site.call.argument("normalized_shape"))
    return [d for d in value.pads if d >= lead]


TRAVELS = {
    **dict.fromkeys((aten.native_layer_norm.default, aten._fused_rms_norm.default, RMS_NORM), forward),
    **dict.fromkeys((aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default, RMS_NORM_BACKWARD), backward),
}
