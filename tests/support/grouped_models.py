"""Attention of grouped heads with one fused projection, taken apart in several ways: q is longer than k and v. Sizes are unfriendly."""
import torch
import torch.nn.functional as F
from torch import nn

WAYS = ("split", "slices", "heads", "picked heads", "transposed weight")
HEADS, SHARED, HEAD, VOCAB, BATCH, SEQ = 6, 2, 4, 251, 3, 37
WIDTH, KEYS = HEADS * HEAD, SHARED * HEAD


class Transposed(nn.Module):
    """Features in the last dim of the weight."""

    def __init__(self, width, features):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, features) / width ** 0.5), nn.Parameter(torch.randn(features) / 8)

    def forward(self, x):
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1)


class Attention(nn.Module):
    def __init__(self, way, heads=HEADS, shared=SHARED):
        super().__init__()
        self.way, self.heads, self.keys = way, heads, shared
        kind = Transposed if way == "transposed weight" else nn.Linear
        self.qkv, self.out = kind(WIDTH, (heads + 2 * shared) * HEAD), nn.Linear(heads * HEAD, WIDTH, bias=False)

    def parts(self, x):
        """q, k and v as [batch, heads, seq, head]."""
        b, s, _ = x.shape
        ends = (self.heads, self.heads + self.keys)
        if self.way == "heads":
            return (t.transpose(1, 2) for t in x.view(b, s, -1, HEAD).split((self.heads, self.keys, self.keys), dim=2))
        if self.way == "picked heads":
            y, keys = x.view(b, s, -1, HEAD), list(range(-2 * self.keys, 0))
            return (t.transpose(1, 2) for t in (y[:, :, :-2 * self.keys], y[:, :, keys[:self.keys]], y[:, :, keys[self.keys:]]))
        if self.way == "slices":
            parts = (x[..., :ends[0] * HEAD], x[..., ends[0] * HEAD:ends[1] * HEAD], x[..., ends[1] * HEAD:])
        else:
            parts = x.unsqueeze(1).split((self.heads * HEAD, self.keys * HEAD, self.keys * HEAD), dim=3)
        return (t.reshape(b, s, -1, HEAD).transpose(1, 2) for t in parts)

    def forward(self, x):
        q, k, v = self.parts(self.qkv(x))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2))


class Grouped(nn.Module):
    def __init__(self, way="split", heads=HEADS, shared=SHARED):
        super().__init__()
        self.words, self.attention = nn.Embedding(VOCAB, WIDTH), Attention(way, heads, shared)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.words(ids)
        return self.head(x + self.attention(self.norm(x)))


def loss(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def build(way="split", heads=HEADS, shared=SHARED):
    g = torch.Generator().manual_seed(1)
    return Grouped(way, heads, shared), tuple(torch.randint(VOCAB, (BATCH, SEQ), generator=g) for _ in range(2))
