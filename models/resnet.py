"""Residual networks with BatchNorm: 18 from basic blocks, 50 from bottlenecks."""
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    blocks: tuple[int, int, int, int]
    bottleneck: bool
    width: int = 64
    image: int = 224
    classes: int = 1000


SIZES = {
    "tiny": Config((2, 2, 2, 2), False, width=8, image=32, classes=16),
    "18": Config((2, 2, 2, 2), False),
    "50": Config((3, 4, 6, 3), True),
}


class ConvNorm(nn.Module):
    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class Block(nn.Module):
    """Basic (3x3, 3x3) or bottleneck (1x1, 3x3, 1x1 to four times the width) with a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool):
        super().__init__()
        if bottleneck:
            shapes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)]
        else:
            shapes = [(inputs, width, 3, stride), (width, width, 3, 1)]
        self.convs = nn.ModuleList(ConvNorm(*shape) for shape in shapes)
        outputs = shapes[-1][1]
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else ConvNorm(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for conv in self.convs[:-1]:
            y = F.relu(conv(y))
        return F.relu(self.convs[-1](y) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.stem = ConvNorm(3, config.width, 7, stride=2)
        channels, blocks = config.width, []
        for stage, count in enumerate(config.blocks):
            width = config.width * 2 ** stage
            for i in range(count):
                blocks.append(Block(channels, width, 2 if stage and not i else 1, config.bottleneck))
                channels = 4 * width if config.bottleneck else width
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, config.classes)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 3, image, image] -> logits [batch, classes]."""
        x = F.max_pool2d(F.relu(self.stem(x)), 3, stride=2, padding=1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def build(size: str = "tiny", *, batch: int | None = None, **overrides) -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = replace(SIZES[size], **overrides)
    batch = batch or 8
    x = torch.randn(batch, 3, config.image, config.image)
    return ResNet(config), (x, torch.randint(config.classes, (batch,)))
