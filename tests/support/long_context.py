"""Models whose sequence is split all the way through, and the seeds that say so."""
from __future__ import annotations

from typing import Any

import torch
from torch import nn

from models import gpt, llama

OWN = {"llama": (llama, "layers"), "gpt": (gpt, "h")}


def build(name: str, seq: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Model and (ids, targets): two layers, one sample, a vocabulary of 251; llama has 8 heads on 4 of keys."""
    torch.manual_seed(0)
    model, inputs = OWN[name][0].build(batch=1, seq=seq, vocab=251)
    return model.double(), inputs


def loss_of(name: str) -> Any:
    return OWN[name][0].loss


def along_sequence(name: str, axes: str) -> dict[str, str]:
    """Inputs, every layer and every attention split along the sequence over `axes`."""
    attention = {f"_scaled_dot_product_flash_attention_for_cpu_{i}": f"-,-,{axes},-" for i in range(2)}
    return {"input:*": f"-,{axes}", **{f"{OWN[name][1]}.{i}": f"-,{axes},-" for i in range(2)}, **attention}
