"""Vision transformer: patch convolution, learned positions, pre-norm encoder, mean over the patches."""
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    layers: int
    width: int
    heads: int
    patch: int
    image: int = 224
    classes: int = 1000
    dropout: float = 0.0


SIZES = {
    "tiny": Config(2, 64, 4, patch=4, image=16, classes=16),
    "b16": Config(12, 768, 12, patch=16),
    "l16": Config(24, 1024, 16, patch=16),
    "h14": Config(32, 1280, 16, patch=14),
}


class Attention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = (w(x).view(b, s, self.heads, -1).transpose(1, 2) for w in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.output(y.transpose(1, 2).reshape(b, s, d))


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.dropout = config.dropout
        self.norm_1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.norm_1(x)), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_2(x)))), self.dropout, self.training)


class Patches(nn.Module):
    """Image [batch, 3, image, image] -> tokens [batch, (image/patch)^2, width], with positions added."""

    def __init__(self, config: Config):
        super().__init__()
        self.conv = nn.Conv2d(3, config.width, config.patch, stride=config.patch)
        self.positions = nn.Parameter(torch.empty((config.image // config.patch) ** 2, config.width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).flatten(2).transpose(1, 2) + self.positions


class ViT(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.patches = Patches(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.classes)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 3, image, image] -> logits [batch, classes]."""
        x = self.patches(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def build(size: str = "tiny", *, batch: int | None = None, **overrides) -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = replace(SIZES[size], **overrides)
    batch = batch or 8
    x = torch.randn(batch, 3, config.image, config.image)
    return ViT(config), (x, torch.randint(config.classes, (batch,)))
