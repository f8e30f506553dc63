"""Models that carry keys and values from call to call in buffers."""
from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attend


class CachedAttention(nn.Module):
    """Attention of `new` tokens over a cache of `length`, which their keys and values are written to at `position` [new]. `write`: how, in
    the words of users' code."""

    def __init__(self, width: int, heads: int, batch: int, length: int, kv_heads: int | None = None, write: str = "index_copy") -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head, self.write = heads, kv_heads or heads, width // heads, write
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, self.kv_heads * self.head, bias=False) for _ in range(2))
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(batch, self.kv_heads, length, self.head))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        b, new, width = x.shape

        def split(t: torch.Tensor, heads: int) -> torch.Tensor:
            return t.view(b, new, heads, self.head).transpose(1, 2)

        self._put(self.keys, position, split(self.k(x), self.kv_heads))
        self._put(self.values, position, split(self.v(x), self.kv_heads))
        seen = torch.arange(self.keys.shape[2], device=x.device) <= position[:, None]
        out = attend(split(self.q(x), self.heads), self.keys, self.values, attn_mask=seen, enable_gqa=self.kv_heads != self.heads)
        return self.o(out.transpose(1, 2).reshape(b, new, width))

    def _put(self, cache: torch.Tensor, position: torch.Tensor, rows: torch.Tensor) -> None:
        if self.write == "index_copy":
            cache.index_copy_(2, position, rows)
        elif self.write == "index_put":
            cache[:, :, position] = rows
        else:
            cache.scatter_(2, position[None, None, :, None].expand_as(rows), rows)


class Decoder(nn.Module):
    """Cached attention layers with an MLP behind each, and a head."""

    def __init__(self, width: int = 24, heads: int = 6, batch: int = 4, length: int = 12, layers: int = 2, vocab: int = 251, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.attention = nn.ModuleList(CachedAttention(width, heads, batch, length, **options) for _ in range(layers))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for attention, mlp in zip(self.attention, self.mlp, strict=True):
            x = x + attention(x, position)
            x = x + mlp(x)
        return self.head(x)
