"""Models of a few layers that several rooms are tested with."""
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(p)

    def forward(self, x):
        return x + self.down(self.drop(F.gelu(self.up(x))))


class Stack(nn.Module):
    """Three blocks, each run by `call(block, x)`."""

    def __init__(self, call=lambda block, x: block(x), p=0.0):
        super().__init__()
        self.blocks, self.call = nn.ModuleList(Block(p) for _ in range(3)), call

    def forward(self, x):
        for block in self.blocks:
            x = self.call(block, x)
        return x


class Wavy(nn.Module):
    """A chain of cheap ops, each of which may run again."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.sigmoid(torch.tanh((x @ self.w).exp()).sin()) * 2.0).sum()
