"""Ops that move elements: where rules let a shard pass from a dim to another, a pad goes with it."""
from __future__ import annotations

from collections.abc import Mapping

import torch

from autoshard.base.graph import Call
from autoshard.base.windows import accumulate_op, hold_op
from autoshard.padding.site import Outcome, Site
from autoshard.padding.values import Pad, joint, merged
from autoshard.rules import registry

aten = torch.ops.aten


def follow(call: Call, tensor: int, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The dims of inputs and of outputs that go with a dim of an input, as the rule's one row for it has them; a negative number where
    a tensor has none. None without such a row."""
    found = {(row.inputs, row.outputs) for row in registry.rows(call) if row.inputs[tensor] == dim and min(row.outputs, default=0) > -2}
    return found.pop() if len(found) == 1 else None


def move(site: Site) -> Outcome:
    """One input, or several that go side by side (`cat`, `stack`). A merge with minor dims (heads x features) has the pad behind them all."""
    values, call = list(site.values), site.call
    stays: dict[int, int] = {}
    pads: list[dict[int, Pad]] = [{} for _ in call.outputs]
    for tensor, dim in [(i, d) for i, v in enumerate(values) for d in v.pads]:
        if dim not in values[tensor].pads:
            continue
        ends = follow(call, tensor, dim)
        if ends is None:
            values[tensor] = site.cut(values[tensor], [dim])
            continue
        pad = values[tensor].pads[dim]
        for i, d in enumerate(ends[0]):
            if d >= 0 and i != tensor:
                values[i] = site.lengthened(values[i], d, pad)
        together = merged(*(values[i].pads[d] for i, d in enumerate(ends[0]) if d >= 0))
        for k, d in enumerate(ends[1]):
            if d >= 0 and (moved := _scaled(together, call.inputs[tensor].shape[dim], call.output(k).shape[d])) is not None:
                pads[k][d] = moved
                stays[d] = dim
    return Outcome(values, pads, stays=stays if len(values) == 1 and len(pads) == 1 else {})


def _scaled(pad: Pad, old: int, new: int) -> Pad | None:
    """The pad of a dim that is merged with minor ones, or cut off them."""
    if pad.true * new % old or pad.length * new % old:
        return None
    return Pad(pad.true * new // old, pad.length * new // old, pad.fill, pad.sources)


def among_zeros(site: Site) -> Outcome:
    """The gradient of a pick: zeros around it."""
    outcome = move(site)
    return Outcome(outcome.values, [{d: p.filled(joint(p.fill, 0.0)) for d, p in its.items()} for its in outcome.pads])


def around(site: Site) -> Outcome:
    """Padding by the model itself, along other dims."""
    outcome, value = move(site), site.call.argument("value")
    fills: Mapping[int, Pad] = {d: p.filled(joint(p.fill, float(value or 0))) for d, p in outcome.pads[0].items()}
    return Outcome(outcome.values, [fills])


TRAVELS = {
    **dict.fromkeys((
        aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default, aten._unsafe_view.default, aten.reshape.default,
        aten.view_copy.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default,
        aten.clone.default, aten.alias.default, aten.detach.default, aten.slice.Tensor, aten.select.int, aten.unbind.int, aten.split.Tensor,
        aten.split_with_sizes.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default, aten.chunk.default, aten.cat.default,
        aten.stack.default, aten.flip.default, aten._to_copy.default, hold_op(), accumulate_op(),
    ), move),
    **dict.fromkeys((aten.select_backward.default, aten.slice_backward.default, aten.tril.default, aten.triu.default), among_zeros),
    aten.constant_pad_nd.default: around,
}
