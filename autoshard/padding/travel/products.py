"""Products of matrices. A contracted dim adds nothing for its pad where one operand is zero there and the other finite."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autoshard.padding.site import Outcome, Site
from autoshard.padding.values import ANY, BESIDE, FINITE, LOWEST, Fill, Pad, Value, is_finite, joint

aten = torch.ops.aten


def product(a: str, b: str, out: str) -> Callable[[Site], Outcome | None]:
    """`product("mk", "kn", "mn")`; with three operands the first is a bias, aligned from the right."""
    def travel(site: Site) -> Outcome | None:
        *bias, left, right = site.values
        for letter in dict.fromkeys(a + b):
            left, right = _as_long(site, left, right, a.find(letter), b.find(letter))
        for letter in set(a) & set(b) - set(out):
            left, right = _summed(site, left, right, a.index(letter), b.index(letter))
        pads = {d: _passed(left, right, a.find(letter), b.find(letter)) for d, letter in enumerate(out)
                if a.find(letter) in left.pads or b.find(letter) in right.pads}
        fill = site.walk.fills.get(site.op.name)
        if not bias:
            return _filled_product(site, left, right, pads) if fill == LOWEST and 1 in pads else Outcome([left, right], [pads])
        added, pads = _biased(site, bias[0], pads, len(out), fill)
        return Outcome([added, left, right], [pads])

    return travel


def _as_long(site: Site, left: Value, right: Value, i: int, j: int) -> tuple[Value, Value]:
    """Both operands padded along a dim that they share."""
    if i >= 0 and j >= 0:
        pad = left.pads.get(i) or right.pads.get(j)
        if pad is not None:
            return site.lengthened(left, i, pad), site.lengthened(right, j, pad)
    return left, right


def _summed(site: Site, left: Value, right: Value, i: int, j: int) -> tuple[Value, Value]:
    if i not in left.pads:
        return left, right
    if right.pads[j].fill == 0.0 and is_finite(left.pads[i].fill):
        return left, right
    left = site.filled(left, i, 0.0)
    return left, right if is_finite(right.pads[j].fill) else site.filled(right, j, 0.0)


def _passed(left: Value, right: Value, i: int, j: int) -> Pad:
    """The pad of a dim of the result: zero where one operand is zero and the other has no infinity or NaN anywhere."""
    mine, other = left.pads.get(i), right.pads.get(j)
    there = [p for p in (mine, other) if p is not None]
    zero = mine is not None and mine.fill == 0.0 or other is not None and other.fill == 0.0
    finite = all(is_finite(p.fill) for v in (left, right) for p in v.pads.values())
    fill: Fill = ANY if not finite else 0.0 if zero else FINITE
    return Pad(there[0].true, there[0].length, fill, frozenset().union(*(p.sources for p in there)))


def _filled_product(site: Site, left: Value, right: Value, pads: dict[int, Pad]) -> Outcome:
    """With a bias that is 0 for what is true, and the lowest behind it."""
    pad, (meta,) = pads[1], site.op.outputs
    assert meta is not None, f"{site.op.name} makes nothing"
    row = site.walk.constant(pad.true, pad.length, meta.dtype)
    pads = {d: p.filled(LOWEST if d == 1 else BESIDE if is_finite(p.fill) else ANY) for d, p in pads.items()}
    return Outcome([row, left, right], [pads], aten.addmm.default, (row.ref, left.ref, right.ref))


def _biased(site: Site, bias: Value, pads: dict[int, Pad], ndim: int, fill: Any) -> tuple[Value, dict[int, Pad]]:
    first = ndim - len(bias.shape)
    for d, pad in pads.items():
        if d >= first:
            bias = site.lengthened(bias, d - first, pad)
    if fill is not None and len(bias.shape) == 1 and 0 in bias.pads:
        bias = site.filled(bias, 0, fill)
    made = {d: p.filled(_sum(p.fill, bias.pads[d - first].fill if d - first in bias.pads else FINITE)) for d, p in pads.items()}
    if not bias.is_finite:
        made |= {d: p.filled(BESIDE if is_finite(p.fill) else ANY) for d, p in made.items() if d - first not in bias.pads}
    return bias, made


def _sum(one: Fill, other: Fill) -> Fill:
    if isinstance(one, str) or isinstance(other, str):
        lowest = LOWEST in (one, other) and FINITE in (one, other)
        return LOWEST if lowest else joint(one, other) if joint(one, other) == FINITE else ANY
    return one + other


TRAVELS = {
    aten.mm.default: product("mk", "kn", "mn"),
    aten.addmm.default: product("mk", "kn", "mn"),
    aten.bmm.default: product("bmk", "bkn", "bmn"),
    aten.baddbmm.default: product("bmk", "bkn", "bmn"),
}
