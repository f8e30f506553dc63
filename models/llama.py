"""Llama 3: RMSNorm, rotary positions, grouped-query attention, SwiGLU, separate output layer."""
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
    kv_heads: int
    hidden: int
    vocab: int = 128256
    context: int = 8192
    theta: float = 500000.0


SIZES = {
    "tiny": Config(2, 64, 8, 4, 128, vocab=256, context=32),
    "1B": Config(16, 2048, 32, 8, 8192),
    "8B": Config(32, 4096, 32, 8, 14336),
    "70B": Config(80, 8192, 64, 8, 28672),
    "405B": Config(126, 16384, 128, 8, 53248),
}


def rotary_tables(seq: int, dim: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, [seq, dim], made on the fly so that no buffer must be kept. At least float32 inside:
    bfloat16 cannot count positions beyond 256."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    frequency = theta ** (-torch.arange(0, dim, 2, dtype=dtype, device=like.device) / dim)
    angle = torch.arange(seq, dtype=dtype, device=like.device).unsqueeze(1) * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [batch, heads, seq, dim]; rotates the pairs (i, i + dim/2)."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.head_dim = config.width // config.heads
        self.groups = config.heads // config.kv_heads
        kv_width = config.kv_heads * self.head_dim
        self.wq = nn.Linear(config.width, config.width, bias=False)
        self.wk = nn.Linear(config.width, kv_width, bias=False)
        self.wv = nn.Linear(config.width, kv_width, bias=False)
        self.wo = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = (w(x).view(b, s, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (t.repeat_interleave(self.groups, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(b, s, d))


class FeedForward(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.w1 = nn.Linear(config.width, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.width, bias=False)
        self.w3 = nn.Linear(config.width, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.output = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [batch, seq] -> logits [batch, seq, vocab]."""
        x = self.tok_embeddings(ids)
        head_dim = self.config.width // self.config.heads
        cos, sin = rotary_tables(ids.shape[1], head_dim, self.config.theta, like=x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.output(self.norm(x))


class Decoder(nn.Module):
    """The same with keys and values of earlier tokens in buffers, for inference: `layers.0.attention.keys` and `.values`, each [batch,
    kv heads, context, head size]."""

    def __init__(self, config: Config, batch: int, context: int):
        super().__init__()
        self.llama = Llama(config)
        for layer in self.llama.layers:
            shape = (batch, config.kv_heads, context, layer.attention.head_dim)
            for name in ("keys", "values"):
                layer.attention.register_buffer(name, torch.zeros(shape), persistent=False)

    def forward(self, ids: Tensor, rows: Tensor) -> Tensor:
        """ids: [batch, new]; rows [new]: where in the caches the new tokens are -> logits [batch, 1, vocab] of the last token."""
        x = self.llama.tok_embeddings(ids)
        config = self.llama.config
        context = self.llama.layers[0].attention.keys.shape[2]
        cos, sin = (t.index_select(0, rows) for t in rotary_tables(context, config.width // config.heads, config.theta, like=x))
        seen = torch.arange(context, device=ids.device) <= rows.unsqueeze(1)
        for layer in self.llama.layers:
            x = x + attend_cached(layer.attention, layer.attention_norm(x), cos, sin, rows, seen)
            x = x + layer.feed_forward(layer.ffn_norm(x))
        return self.llama.output(self.llama.norm(x[:, -1:]))


def attend_cached(layer: Attention, x: Tensor, cos: Tensor, sin: Tensor, rows: Tensor, seen: Tensor) -> Tensor:
    """Attention of new tokens over the caches, which get their keys and values. `seen` [new, context]: what each new token sees."""
    b, s, d = x.shape
    q, k, v = (w(x).view(b, s, -1, layer.head_dim).transpose(1, 2) for w in (layer.wq, layer.wk, layer.wv))
    layer.keys.index_copy_(2, rows, rotate(k, cos, sin))
    layer.values.index_copy_(2, rows, v)
    y = F.scaled_dot_product_attention(rotate(q, cos, sin), layer.keys, layer.values, attn_mask=seen, enable_gqa=layer.groups > 1)
    return layer.wo(y.transpose(1, 2).reshape(b, s, d))


def decoder(size: str = "tiny", *, batch: int = 1, context: int | None = None, **overrides):
    """-> (model with caches, inputs), where inputs(new, start) are those of `new` tokens after `start` others."""
    config = replace(SIZES[size], **overrides)
    context = context or config.context

    def inputs(new: int, start: int) -> tuple[Tensor, Tensor]:
        return torch.randint(config.vocab, (batch, new)), torch.arange(start, start + new)

    return Decoder(config, batch, context), inputs


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def build(size: str = "tiny", *, batch: int | None = None, seq: int | None = None,
          **overrides) -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = replace(SIZES[size], **overrides)
    shape = (batch or 8, seq or config.context)
    return Llama(config), (torch.randint(config.vocab, shape), torch.randint(config.vocab, shape))
