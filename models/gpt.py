"""GPT-2 in the style of nanoGPT: pre-norm, learned positions, the embedding shared with the output layer.

The fused query/key/value projection is laid out heads first, [heads, 3, head dim], so that a contiguous
piece of its rows is a set of whole heads.
"""
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
    vocab: int = 50304
    context: int = 1024
    dropout: float = 0.0


SIZES = {
    "tiny": Config(2, 64, 4, vocab=256, context=32),
    "124M": Config(12, 768, 12),
    "350M": Config(24, 1024, 16),
    "774M": Config(36, 1280, 20),
    "1.5B": Config(48, 1600, 20),  # GPT-2 has 25 heads, which no mesh splits; the parameters are the same
}


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Attention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.c_attn = Linear(config.width, 3 * config.width)
        self.c_proj = Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        qkv = self.c_attn(x).view(b, s, self.heads, 3 * d // self.heads).transpose(1, 2)
        q, k, v = qkv.chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        return F.dropout(self.c_proj(y.transpose(1, 2).reshape(b, s, d)), self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.dropout = config.dropout
        self.c_fc = Linear(config.width, 4 * config.width)
        self.c_proj = Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.c_proj(F.gelu(self.c_fc(x))), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.dropout = config.dropout
        self.wte = Embedding(config.vocab, config.width)
        self.wpe = Embedding(config.context, config.width)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width)
        self.lm_head = Linear(config.width, config.vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [batch, seq] -> logits [batch, seq, vocab]."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = F.dropout(self.wte(ids) + self.wpe(positions), self.dropout, self.training)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def build(size: str = "tiny", *, batch: int | None = None, seq: int | None = None,
          **overrides) -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = replace(SIZES[size], **overrides)
    shape = (batch or 8, seq or config.context)
    if shape[1] > config.context:
        config = replace(config, context=shape[1])
    return GPT(config), (torch.randint(config.vocab, shape), torch.randint(config.vocab, shape))
