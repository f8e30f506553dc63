"""DLRM (arXiv 1906.00091): embedding tables for the sparse features, an MLP for the dense ones, their
pairwise dot products, and an MLP that predicts a click."""
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    tables: int
    rows: int
    width: int
    dense: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    hot: int = 1


SIZES = {
    "tiny": Config(8, 64, 16, 16, (32,), (64, 32), hot=2),
    "small": Config(26, 100_000, 64, 13, (512, 256), (512, 256)),
    "large": Config(26, 4_000_000, 128, 13, (512, 256), (1024, 1024, 512, 256)),
}


class MLP(nn.Module):
    """ReLU after every layer but, if `logits`, the last."""

    def __init__(self, widths: tuple[int, ...], logits: bool):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in zip(widths, widths[1:]))
        self.logits = logits

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        x = self.layers[-1](x)
        return x if self.logits else F.relu(x)


class DLRM(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        features = config.tables + 1
        self.tables = nn.ModuleList(nn.Embedding(config.rows, config.width) for _ in range(config.tables))
        self.bottom = MLP((config.dense, *config.bottom, config.width), logits=False)
        self.top = MLP((config.width + features * (features - 1) // 2, *config.top, 1), logits=True)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """dense: [batch, dense]; sparse: ints [batch, tables, hot], a bag per table -> logits [batch]."""
        x = self.bottom(dense)
        bags = [table(sparse[:, i]).mean(dim=1) for i, table in enumerate(self.tables)]
        features = torch.stack((x, *bags), dim=1)
        products = torch.bmm(features, features.transpose(1, 2))
        count = features.shape[1]
        row, column = torch.tril_indices(count, count, offset=-1, device=x.device)
        return self.top(torch.cat((x, products[:, row, column]), dim=1)).squeeze(1)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, target)


def build(size: str = "tiny", *, batch: int | None = None, **overrides) -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = replace(SIZES[size], **overrides)
    batch = batch or 8
    dense = torch.randn(batch, config.dense)
    sparse = torch.randint(config.rows, (batch, config.tables, config.hot))
    target = (torch.arange(batch) % 3 == 0).to(dense.dtype)
    return DLRM(config), (dense, sparse, target)
