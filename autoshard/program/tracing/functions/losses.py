"""Losses of torch that are computed by their formulas while a model is traced.

`multilabel_margin_loss`: a trace that asks torch for its own formula gets one (of torch 2.13) that also counts a margin for every place behind the
last label, which the kernel does not. `gaussian_nll_loss`: looks at the data of its variances, which becomes a check of the program.
`l1_loss`: torch 2.13 hands it to modes without its weight.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autoshard.program.tracing.tape import user_line

MARGINS, GAUSSIAN = F.multilabel_margin_loss, F.gaussian_nll_loss
REDUCE: Mapping[str, Callable[[Tensor], Tensor]] = {"mean": torch.mean, "sum": torch.sum, "none": lambda x: x}


class Losses(TorchFunctionMode):
    """`note(truth, text)`: the program must find `truth`."""

    def __init__(self, note: Callable[[Tensor, str], None]) -> None:
        super().__init__()
        self.note, self.hand_over = note, F.handle_torch_function

    def __enter__(self) -> Losses:
        F.handle_torch_function = self._with_weight
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        F.handle_torch_function = self.hand_over
        super().__exit__(*error)

    def _with_weight(self, func: Any, tensors: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if func is F.l1_loss:
            kwargs.setdefault("weight", tensors[2])
        return self.hand_over(func, tensors, *args, **kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is MARGINS:
            return _margins(*args, **kwargs)
        return self._gaussian(*args, **kwargs) if func is GAUSSIAN else func(*args, **kwargs)

    def _gaussian(self, input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean") -> Tensor:
        """Arguments are named as torch names them. Gradients pass the bound of the variances, as they do there."""
        if not isinstance(var, Tensor):
            return GAUSSIAN(input, target, var, full, eps, reduction)
        GAUSSIAN(input, target, 1.0, full, eps, reduction)  # raises what it raises
        if input.shape != var.shape and input.shape[:-1] == var.shape:
            var = var.unsqueeze(-1)
        elif var.shape not in (input.shape, (*input.shape[:-1], 1)):
            raise ValueError("var is of incorrect size")
        with torch.no_grad():
            self.note((var >= 0).all(), f"{user_line().removeprefix(' at ')}: var has negative entry/entries")
            less = var.clamp(min=eps) - var
        var = var + less
        loss = 0.5 * (var.log() + (input - target) ** 2 / var) + (0.5 * math.log(2 * math.pi) if full else 0.0)
        return REDUCE[reduction](loss)


def _margins(input: Tensor, target: Tensor, size_average: Any = None, reduce: Any = None, reduction: str = "mean") -> Tensor:
    """Of every sample sum(max(0, 1 - (x[label] - x[other]))) / n over its labels, up to the first -1, and all others."""
    if input.shape != target.shape or input.ndim not in (1, 2) or not (size_average is reduce is None) or reduction not in REDUCE:
        return MARGINS(input, target, size_average, reduce, reduction)
    n = input.shape[-1]
    places = torch.arange(n, device=target.device)
    is_label = places < torch.where(target == -1, places, n).amin(-1, keepdim=True)
    labels = torch.where(is_label, target, 0)
    is_named = ((labels.unsqueeze(-1) == places) & is_label.unsqueeze(-1)).any(-2)
    margins = (1 - input.gather(-1, labels).unsqueeze(-1) + input.unsqueeze(-2)).clamp_min(0)
    counts = is_label.unsqueeze(-1) & ~is_named.unsqueeze(-2)
    return REDUCE[reduction](torch.where(counts, margins, 0).sum((-2, -1)) / n)
