"""Mixed precision as a policy on parameters, instead of edits to the model."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard.errors import UsageError

DTYPES = {
    "fp64": torch.float64, "float64": torch.float64,
    "fp32": torch.float32, "float32": torch.float32,
    "fp16": torch.float16, "float16": torch.float16,
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
}
BATCH_NORMS = (nn.modules.batchnorm._NormBase,)


@dataclass(frozen=True)
class Precision:
    """Dtypes by name ("bf16", "fp16", "fp32", "fp64").

    param    dtype the model computes in: stored floating parameters, buffers and inputs are cast to it
             where they enter; None computes in the stored dtype
    master   dtype parameters are stored in and the optimizer sees; gradients are returned in it
    reduce   dtype gradients are summed over ranks in: equal to `master` the reduction comes after the
             gradient's cast, equal to `param` before it; a gradient that a model computes in a wider dtype (norms, say)
             is rounded to it on every rank before. Neither of the two: gradients are cast to it and back

    Batch norms take parameters and statistics in fp32 where the rest computes in bf16 or fp16: running averages in bf16 stop moving, and torch
    takes both in one dtype alone. Statistics are stored as the model has them.
    Raises UsageError for an unknown dtype name.
    """

    param: str | None = "bf16"
    master: str = "fp32"
    reduce: str = "fp32"

    def __post_init__(self) -> None:
        for role, name in (("param", self.param), ("master", self.master), ("reduce", self.reduce)):
            if not isinstance(name, str | None) or name not in DTYPES and not (role == "param" and name is None):
                raise UsageError(f"precision {role}={name!r} is not a dtype; use one of bf16, fp16, fp32, fp64")

    @property
    def compute(self) -> torch.dtype:
        return DTYPES[self.param or self.master]

    @property
    def stored(self) -> torch.dtype:
        return DTYPES[self.master]

    @property
    def in_norms(self) -> torch.dtype:
        """What batch norms take parameters and statistics in."""
        return torch.float32 if self.compute in (torch.bfloat16, torch.float16) else self.compute

    @property
    def reduction(self) -> torch.dtype:
        return DTYPES[self.reduce]

    def through_reduction(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient in `master`, cast to `reduce` and back where neither `param` nor `master` is that dtype: it would never be
        in it otherwise."""
        if not gradient.dtype.is_floating_point or self.reduction in (self.compute, self.stored):
            return gradient
        return gradient.to(self.reduction).to(gradient.dtype)

    def cast(self, model: nn.Module) -> None:
        """Put casts to the compute dtype (of batch norms: `in_norms`) where `model` holds floating parameters and buffers, one per tensor. They are
        differentiable: gradients arrive at what the model held before."""
        casts: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        for module in model.modules():
            dtype = self.in_norms if isinstance(module, BATCH_NORMS) else self.compute
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for table in tables:
                for key, t in table.items():
                    if t is not None and t.dtype.is_floating_point and t.dtype != dtype and t.layout is torch.strided:
                        if (id(t), dtype) not in casts:
                            casts[id(t), dtype] = t.to(dtype)
                        table[key] = casts[id(t), dtype]
