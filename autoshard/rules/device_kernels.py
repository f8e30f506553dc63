"""What runs the ops of a trace, which is made on the CPU, on other devices."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autoshard.rules import attention_kernels
from autoshard.rules.ops import rms_norm

ELSEWHERE: dict[Any, Callable[..., Any]] = {**attention_kernels.ELSEWHERE, **rms_norm.ON_GPU}
"""By op; all others run as they are."""


def on_device(target: Any, device: torch.device) -> Any:
    """What runs `target` on `device`."""
    return target if device.type == "cpu" else ELSEWHERE.get(target, target)
