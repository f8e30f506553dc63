"""BERT with its masked-language-model head: post-norm encoder, token types, padding mask, tied output layer."""
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
    vocab: int = 30528
    context: int = 512
    dropout: float = 0.0


SIZES = {
    "tiny": Config(2, 64, 4, vocab=256, context=32),
    "base": Config(12, 768, 12),
    "large": Config(24, 1024, 16),
}


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Attention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        b, s, d = x.shape
        q, k, v = (w(x).view(b, s, self.heads, -1).transpose(1, 2) for w in (self.query, self.key, self.value))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
        return self.output(y.transpose(1, 2).reshape(b, s, d))


class Layer(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.dropout = config.dropout
        self.attention = Attention(config)
        self.attention_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.output_norm = nn.LayerNorm(config.width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        y = F.dropout(self.attention(x, mask), self.dropout, self.training)
        x = self.attention_norm(x + y)
        y = F.dropout(self.down(F.gelu(self.up(x))), self.dropout, self.training)
        return self.output_norm(x + y)


class OutputBias(nn.Module):
    """The tied output layer has the embedding's weight but a bias of its own."""

    def __init__(self, vocab: int):
        super().__init__()
        self.bias = nn.Parameter(torch.empty(vocab))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight, self.bias)


class BERT(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.dropout = config.dropout
        self.words = Embedding(config.vocab, config.width)
        self.positions = Embedding(config.context, config.width)
        self.types = Embedding(2, config.width)
        self.norm = nn.LayerNorm(config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.transform = nn.Linear(config.width, config.width)
        self.transform_norm = nn.LayerNorm(config.width)
        self.decoder = OutputBias(config.vocab)

    def forward(self, ids: Tensor, types: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """ids, types: [batch, seq] ints; mask: [batch, seq] bools, False is padding -> logits [batch, seq, vocab]."""
        x = self.words(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = x + self.types(torch.zeros_like(ids) if types is None else types)
        x = F.dropout(self.norm(x), self.dropout, self.training)
        if mask is not None:
            mask = mask[:, None, None, :]
        for layer in self.layers:
            x = layer(x, mask)
        return self.decoder(self.transform_norm(F.gelu(self.transform(x))), self.words.weight)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean over the masked positions; -100 marks the others."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100)


def build(size: str = "tiny", *, batch: int | None = None, seq: int | None = None,
          **overrides) -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = replace(SIZES[size], **overrides)
    batch, seq = batch or 8, seq or config.context
    if seq > config.context:
        config = replace(config, context=seq)
    ids = torch.randint(config.vocab, (batch, seq))
    place = torch.arange(batch * seq).view(batch, seq)
    types = (place % seq >= seq // 2).long()
    mask = place % seq < seq - place // seq % 4  # rows end in 0 to 3 tokens of padding
    target = torch.where(place % 7 == 0, ids, -100)
    return BERT(config), (ids, types, mask, target)
