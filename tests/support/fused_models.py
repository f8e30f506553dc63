"""A decoder with fused projections, whose parts the model takes apart in several ways: q|k|v, gate|up. Sizes are unfriendly."""
import torch
import torch.nn.functional as F
from torch import nn

WAYS = ("split", "slices", "view", "chunked heads")
HEADS, HEAD, VOCAB, BATCH, SEQ = 6, 4, 251, 3, 37
WIDTH = HEADS * HEAD


class Attention(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.qkv, self.out = way, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def heads(self, x):
        """q, k and v as [batch, heads, seq, head]."""
        b, s, _ = x.shape
        if self.way == "view":
            return x.view(b, s, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4).unbind(0)
        if self.way == "chunked heads":
            return (t.transpose(1, 2) for t in x.view(b, s, 3 * HEADS, HEAD).chunk(3, dim=2))
        parts = x.split(WIDTH, dim=-1) if self.way == "split" else (x[..., i * WIDTH:(i + 1) * WIDTH] for i in range(3))
        return (t.view(b, s, HEADS, HEAD).transpose(1, 2) for t in parts)

    def forward(self, x):
        q, k, v = self.heads(self.qkv(x))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))


class Fused(nn.Module):
    def __init__(self, way="split"):
        super().__init__()
        self.words, self.attention = nn.Embedding(VOCAB, WIDTH), Attention(way)
        self.one, self.two = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.gate_up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, ids):
        x = self.words(ids)
        x = x + self.attention(self.one(x))
        gate, up = self.gate_up(self.two(x)).chunk(2, dim=-1)
        return (x + self.down(F.silu(gate) * up)) @ self.words.weight.t()


def loss(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def build(way="split"):
    g = torch.Generator().manual_seed(1)
    return Fused(way), tuple(torch.randint(VOCAB, (BATCH, SEQ), generator=g) for _ in range(2))


SPLIT_HEADS = {"attention.qkv.weight": ("tp", None), "attention.qkv.bias": ("tp",), "attention.out.weight": (None, "tp"),
               "gate_up.weight": ("tp", None), "down.weight": (None, "tp")}
"""Seeds: heads and hidden features split, as Megatron does."""
