"""Attention with more heads, and more rows of the batch, than there are: each is computed by itself, and none looks at another."""
from __future__ import annotations

from collections.abc import Sequence

import torch

from autoshard.padding.site import Outcome, Site
from autoshard.padding.values import ANY, FINITE, Fill, Value, is_finite

aten = torch.ops.aten
BATCH, HEADS = 0, 1


def attention(site: Site) -> Outcome | None:
    """A head of zeros has the mean of its values."""
    values = _alike(site, list(site.values))
    if values is None:
        return None
    query, _, value, *_ = values
    pads = {d: p.filled(_fill(values, d, value)) for d, p in query.pads.items()}
    kept = {d: p.filled(FINITE if is_finite(p.fill) else ANY) for d, p in pads.items()}
    return Outcome(values, [pads if i == 0 else kept if i == 1 else {} for i in range(len(site.op.outputs))])


def backward(site: Site) -> Outcome | None:
    """Where the gradient is zero, so are those of query, key and value."""
    found = _alike(site, list(site.values))
    if found is None:
        return None
    grad, *others = found
    others = [site.finite(v) for v in others]
    for d in list(grad.pads):
        grad = site.filled(grad, d, 0.0)
    values = [grad, *others]
    made = [{d: p.filled(0.0) for d, p in v.pads.items()} for v in others[:3]]
    return Outcome(values, [made[i] if i < 3 and m is not None else {} for i, m in enumerate(site.op.outputs)])


def _alike(site: Site, values: list[Value]) -> list[Value] | None:
    """All of them padded alike along batch and heads, and along nothing else; None where heads of keys would serve others than they do."""
    values = [site.cut(v, [d for d in v.pads if d not in (BATCH, HEADS)]) for v in values]
    first = 1 if site.call.given("grad_out") is not None else 0
    keys = (first + 1, first + 2)
    for dim in (BATCH, HEADS):
        rest = [i for i in range(len(values)) if dim == BATCH or i not in keys]
        if (pad := next((values[i].pads[dim] for i in rest if dim in values[i].pads), None)) is not None:
            values = [site.lengthened(v, dim, pad) if i in rest else v for i, v in enumerate(values)]
    heads = [values[i].shape[HEADS] for i in (first, *keys)]
    old = [site.call.tensor(name).shape[HEADS] for name in ("query", "key", "value")]
    served = old[1] == 1 and heads[1:] == [1, 1] or all(n * old[0] == heads[0] * o for n, o in zip(heads[1:], old[1:], strict=True))
    return values if served and _mask_is_plain(site, values) else None


def _mask_is_plain(site: Site, values: Sequence[Value]) -> bool:
    """A mask that is padded itself may hide all keys from a row: it reads true values."""
    mask = site.call.given("attn_mask")
    return mask is None or not values[-1].pads


def _fill(values: Sequence[Value], dim: int, value: Value) -> Fill:
    if not all(v.is_finite for v in values):
        return ANY
    return 0.0 if dim in value.pads and value.pads[dim].fill == 0.0 else FINITE


TRAVELS = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: backward,
}
