"""Lists of parameters that are DTensors in part: those of a compiled model beside others, as a head or a temperature outside of it.

torch's clipping, foreach optimizers and averages take a list at once, and raise where it has both ("got mixed torch.Tensor and DTensor"). Here
each kind is done apart."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

aten = torch.ops.aten
NAMES = """norm mul mul_ add add_ sub sub_ neg neg_ div div_ lerp lerp_ addcmul addcmul_ addcdiv addcdiv_ sqrt sqrt_ rsqrt rsqrt_ abs abs_
    sign sign_ pow pow_ maximum maximum_ minimum minimum_ clamp_min clamp_min_ clamp_max clamp_max_ reciprocal reciprocal_ zero_""".split()
"""What torch.optim, `swa_utils`, clipping and loops by hand call, behind `_foreach_`."""
OPS = tuple(getattr(op, overload) for op in (*(getattr(aten, f"_foreach_{name}") for name in NAMES), aten._fused_adam_, aten._fused_adamw_)
            for overload in op.overloads() if "out" not in overload)


def apart(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In place of an op of lists, the first of which says how many there are."""
    are = [isinstance(t, DTensor) for t in args[0]]
    if len(set(are)) < 2:
        return NotImplemented
    results: list[Any] = [None] * len(are)
    for kind in (True, False):
        at = [i for i, own in enumerate(are) if own is kind]
        made = op(*(_part(a, at, len(are), kind) for a in args), **{name: _part(a, at, len(are), kind) for name, a in kwargs.items()})
        for i, value in zip(at, made or (), strict=False):
            results[i] = value
    return None if None in results else results


def _part(value: Any, at: Sequence[int], n: int, dtensors: bool) -> Any:
    """What of an argument goes with the tensors `at` these places."""
    if isinstance(value, (list, tuple)) and len(value) == n:
        return [value[i] for i in at]
    return value.full_tensor() if isinstance(value, DTensor) and not dtensors else value


def norm_of_both(theirs: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch's function for the norm of all gradients, for lists of both kinds, too. Their norm is a plain tensor, which both can be multiplied by."""
    return partial(_norm, theirs)


def _norm(theirs: Callable[..., torch.Tensor], tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False,
          foreach: bool | None = None) -> torch.Tensor:
    grads = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    split = [g for g in grads if isinstance(g, DTensor)]
    if len(split) in (0, len(grads)):
        return theirs(grads, norm_type, error_if_nonfinite, foreach)
    norms = [theirs(part, norm_type, False, foreach) for part in (split, [g for g in grads if not isinstance(g, DTensor)])]
    return theirs([norms[0].full_tensor(), norms[1].to(norms[0].device)], norm_type, error_if_nonfinite, foreach)
