"""Mixed precision as a policy on parameters, instead of edits to the model."""
from __future__ import annotations

from dataclasses import dataclass

import torch

from autoshard.errors import UsageError

DTYPES = {
    "fp64": torch.float64, "float64": torch.float64,
    "fp32": torch.float32, "float32": torch.float32,
    "fp16": torch.float16, "float16": torch.float16,
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True)
class Precision:
    """Dtypes by name ("bf16", "fp16", "fp32", "fp64").

    param    dtype the model computes in: stored floating parameters, buffers and inputs are cast to it
             where they enter; None computes in the stored dtype
    master   dtype parameters are stored in and the optimizer sees; gradients are returned in it
    reduce   dtype gradients are summed over ranks in: equal to `master` the reduction comes after the
             gradient's cast, equal to `param` before it

    Batch norms keep their parameters and statistics in `master`: running averages in bf16 stop moving.
    Raises UsageError for an unknown dtype name.
    """

    param: str | None = "bf16"
    master: str = "fp32"
    reduce: str = "fp32"

    def __post_init__(self) -> None:
        for role, name in (("param", self.param), ("master", self.master), ("reduce", self.reduce)):
            if name not in DTYPES and not (role == "param" and name is None):
                raise UsageError(f"precision {role}={name!r} is not a dtype; use one of bf16, fp16, fp32, fp64")

    @property
    def compute(self) -> torch.dtype:
        return DTYPES[self.param or self.master]

    @property
    def stored(self) -> torch.dtype:
        return DTYPES[self.master]

    @property
    def reduction(self) -> torch.dtype:
        return DTYPES[self.reduce]
