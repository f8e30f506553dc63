"""Multi-layer perceptron with ReLU; `base` is the 784-512-512-10 classifier of MNIST."""
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    widths: tuple[int, ...]


SIZES = {
    "tiny": Config((16, 32, 32, 8)),
    "base": Config((784, 512, 512, 10)),
    "wide": Config((4096, 16384, 16384, 4096)),
}


class MLP(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        widths = config.widths
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in zip(widths, widths[1:]))

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, widths[0]] -> logits [batch, widths[-1]]."""
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def build(size: str = "tiny", *, batch: int | None = None, **overrides) -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = replace(SIZES[size], **overrides)
    batch = batch or 8
    x = torch.randn(batch, config.widths[0])
    target = torch.randint(config.widths[-1], (batch,))
    return MLP(config), (x, target)
