"""Slices of DTensors that are written into: `weight[0] = 0`, `weight[3].zero_()`.

For a slice along a split dim torch gathers the tensor, so what is written into the slice goes into a copy, and is lost. Such a slice knows here what
it was taken of, and what is written into it is written there too. Every rank does so, since placements say what was gathered."""
from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

aten = torch.ops.aten
SLICES = (aten.select.int, aten.slice.Tensor, aten.diagonal.default, aten.split.Tensor, aten.split_with_sizes.default, aten.view.default)
"""Of a view that merges dims torch has none of pieces that are not equally long, so those are gathered ([whole.py](whole.py))."""
WRITES = """acos_ acosh_ add_ addbmm_ addmm_ addmv_ addr_ asin_ asinh_ atan2_ atan_ atanh_ baddbmm_ bitwise_and_ bitwise_not_ bitwise_or_
    bitwise_xor_ ceil_ celu_ clip_ copysign_ cos_ cosh_ cumprod_ cumsum_ div_ elu_ eq_ erf_ erfc_ erfinv_ exp2_ expm1_ floor_ floor_divide_
    fmod_ frac_ ge_ gt_ hardswish_ hardtanh_ heaviside_ hypot_ index_fill_ le_ leaky_relu_ log10_ log1p_ log2_ logical_and_ logical_not_
    logical_or_ logical_xor_ logit_ lt_ masked_fill_ masked_scatter_ mish_ mul_ ne_ nextafter_ pow_ put_ relu_ remainder_ renorm_ scatter_
    scatter_reduce_ sgn_ sigmoid_ sign_ silu_ sin_ sinc_ sinh_ square_ sub_ tan_ tanh_ threshold_ tril_ triu_ xlogy_ zero_""".split()
"""What else is written into slices, besides ops that are done here in another way than torch's."""
OF = "_autoshard_slice_of"


def writes() -> tuple[Any, ...]:
    """The ops of `WRITES`."""
    packets = (getattr(aten, name) for name in WRITES)
    return tuple(getattr(packet, overload) for packet in packets for overload in packet.overloads() if overload != "out")


def remember(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> None:
    """`found`: what `op`, one of `SLICES`, made of its arguments."""
    x = args[0]
    if not isinstance(x, DTensor):
        return
    for i, part in enumerate(found if isinstance(found, (list, tuple)) else [found]):
        gathered = any(_splits(p) and not _splits(q) for p, q in zip(x.placements, part.placements, strict=True))
        if gathered or hasattr(x, OF):
            setattr(part, OF, (x, (op, args[1:], kwargs, i) if gathered else None))


def _splits(p: Any) -> bool:
    return not p.is_replicate() and not p.is_partial()


@torch.no_grad()
def put_back(part: Any) -> None:
    """`part` was written into: so is what it was taken of, where it is a slice."""
    of = getattr(part, OF, None)
    if of is None:
        return
    x, taken = of
    if taken is None:  # its memory is that of `x`
        put_back(x)
        return
    op, rest, kwargs, i = taken
    whole = x.full_tensor()
    there = op(whole, *rest, **kwargs)
    (there[i] if isinstance(there, (list, tuple)) else there).copy_(part.full_tensor())
    x.copy_(whole)
