"""A decoder none of whose dims divides where one would split it: a vocabulary of 251, 37 hidden features; and how to split them all the same."""
import torch
import torch.nn.functional as F
from torch import nn

VOCAB, WIDTH, HIDDEN, HEADS, BATCH, SEQ = 251, 24, 37, 4, 2, 9


class Uneven(nn.Module):
    """`tied`: the head is the table of words, as GPT-2 has it; else a linear layer with a bias, as BERT. Returns loss and logits."""

    def __init__(self, tied=True, smoothing=0.0, vocab=VOCAB, hidden=HIDDEN):
        super().__init__()
        self.words, self.qkv, self.out = nn.Embedding(vocab, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.one, self.two, self.up, self.down = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.head = nn.Linear(WIDTH, vocab, bias=not tied)
        if tied:
            self.head.weight = self.words.weight
        self.smoothing = smoothing

    def forward(self, ids, target):
        x = self.words(ids)
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, HEADS, -1).transpose(1, 2) for t in self.qkv(self.one(x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, WIDTH))
        x = x + self.down(F.gelu(self.up(self.two(x)), approximate="tanh"))
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=self.smoothing), "logits": logits}


def build(tied=True, smoothing=0.0, vocab=VOCAB, hidden=HIDDEN):
    g = torch.Generator().manual_seed(1)
    return Uneven(tied, smoothing, vocab, hidden), tuple(torch.randint(vocab, (BATCH, SEQ), generator=g) for _ in range(2))


SPLIT = {"words.weight": ("tp", None), "up.weight": ("tp", None), "up.bias": ("tp",), "down.weight": (None, "tp")}
"""Seeds: words and hidden features split."""
