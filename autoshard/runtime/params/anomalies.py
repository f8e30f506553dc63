"""`torch.autograd.detect_anomaly` over gradients that are DTensors: torch 2.13 asks each whether any of its numbers is NaN by an op for which
DTensor has no rule. Its argument, a flag an element, is gathered: as slow as looking for NaN is anyway."""
from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.experimental import register_sharding


@register_sharding(torch.ops.aten._is_any_true.default)
def _on_all_flags(flags: Any) -> list[Any]:
    return [([Replicate()], [Replicate()])]
