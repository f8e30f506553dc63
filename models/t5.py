"""T5 encoder-decoder: RMSNorm, bucketed relative position bias, cross attention, one embedding for all three uses."""
from __future__ import annotations

from dataclasses import dataclass, replace
from math import log

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    layers: int
    width: int
    heads: int
    head_dim: int
    hidden: int
    vocab: int = 32128
    context: int = 512
    buckets: int = 32
    far: int = 128


SIZES = {
    "tiny": Config(2, 64, 4, 16, 128, vocab=256, context=32, buckets=8, far=16),
    "small": Config(6, 512, 8, 64, 2048),
    "base": Config(12, 768, 12, 64, 3072),
    "large": Config(24, 1024, 16, 64, 4096),
    "3B": Config(24, 1024, 32, 128, 16384),
    "11B": Config(24, 1024, 128, 128, 65536),
}


class RelativeBias(nn.Module):
    """One learned bias per head and bucket of key position minus query position; near distances have
    a bucket each, farther ones share logarithmic buckets up to `far`."""

    def __init__(self, config: Config, causal: bool):
        super().__init__()
        self.buckets, self.far, self.causal = config.buckets, config.far, causal
        self.table = nn.Embedding(config.buckets, config.heads)

    def bucket(self, offset: Tensor) -> Tensor:
        """offset: ints [query, key] -> bucket indices of the same shape."""
        count = self.buckets if self.causal else self.buckets // 2
        base = 0 if self.causal else (offset > 0).long() * count
        distance = (-offset).clamp(min=0) if self.causal else offset.abs()
        near = count // 2
        ratio = torch.log(distance.clamp(min=1).float() / near) / log(self.far / near)
        large = (near + (ratio * (count - near)).long()).clamp(max=count - 1)
        return base + torch.where(distance < near, distance, large)

    def forward(self, seq: int) -> Tensor:
        """-> [heads, seq, seq], -inf where a causal query must not look."""
        place = torch.arange(seq, device=self.table.weight.device)
        offset = place.unsqueeze(0) - place.unsqueeze(1)
        bias = self.table(self.bucket(offset)).permute(2, 0, 1)
        return bias.masked_fill(offset > 0, float("-inf")) if self.causal else bias


class Attention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.heads = config.heads
        inner = config.heads * config.head_dim
        self.q = nn.Linear(config.width, inner, bias=False)
        self.k = nn.Linear(config.width, inner, bias=False)
        self.v = nn.Linear(config.width, inner, bias=False)
        self.o = nn.Linear(inner, config.width, bias=False)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None) -> Tensor:
        """x: [batch, query, width]; memory: [batch, key, width]; bias: [heads, query, key]. T5 does not scale."""
        pairs = ((self.q, x), (self.k, memory), (self.v, memory))
        q, k, v = (w(t).view(*t.shape[:2], self.heads, -1).transpose(1, 2) for w, t in pairs)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config: Config, cross: bool):
        super().__init__()
        self.self_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.self_attention = Attention(config)
        self.cross_norm = nn.RMSNorm(config.width, eps=1e-6) if cross else None
        self.cross_attention = Attention(config) if cross else None
        self.ff_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.wi = nn.Linear(config.width, config.hidden, bias=False)
        self.wo = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None) -> Tensor:
        y = self.self_norm(x)
        x = x + self.self_attention(y, y, bias)
        if memory is not None:
            x = x + self.cross_attention(self.cross_norm(x), memory, None)
        return x + self.wo(F.relu(self.wi(self.ff_norm(x))))


class Stack(nn.Module):
    def __init__(self, config: Config, decoder: bool):
        super().__init__()
        self.bias = RelativeBias(config, causal=decoder)
        self.blocks = nn.ModuleList(Block(config, cross=decoder) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-6)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        bias = self.bias(x.shape[1])
        for block in self.blocks:
            x = block(x, bias, memory)
        return self.norm(x)


class T5(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.shared = nn.Embedding(config.vocab, config.width)
        self.encoder = Stack(config, decoder=False)
        self.decoder = Stack(config, decoder=True)
        self.lm_head = nn.Linear(config.width, config.vocab, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, ids: Tensor, decoder_ids: Tensor) -> Tensor:
        """ids: [batch, seq], decoder_ids: [batch, seq] -> logits [batch, seq, vocab]."""
        memory = self.encoder(self.shared(ids))
        y = self.decoder(self.shared(decoder_ids), memory)
        return self.lm_head(y * y.shape[-1] ** -0.5)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def build(size: str = "tiny", *, batch: int | None = None, seq: int | None = None,
          **overrides) -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = replace(SIZES[size], **overrides)
    shape = (batch or 8, seq or config.context)
    return T5(config), tuple(torch.randint(config.vocab, shape) for _ in range(3))
