"""Decoder with mixture-of-experts layers: each token goes to its two best experts.

Routing has static shapes, after GShard (arXiv 2006.16668): every sequence offers each expert `capacity`
slots, filled in token order; what overflows is dropped and passes by the residual. Dispatch and combine
are batched matmuls, and an expert's weights are one slice of a 3-D parameter [experts, in, out].
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    layers: int
    width: int
    heads: int
    hidden: int
    experts: int
    top: int = 2
    capacity_factor: float = 1.25
    vocab: int = 32000
    context: int = 4096


SIZES = {
    "tiny": Config(2, 64, 4, 64, experts=4, vocab=256, context=32),
    "small": Config(12, 768, 12, 3072, experts=8, context=1024),
    "8x7B": Config(32, 4096, 32, 14336, experts=8),
}


class Attention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.heads = config.heads
        self.wq = nn.Linear(config.width, config.width, bias=False)
        self.wk = nn.Linear(config.width, config.width, bias=False)
        self.wv = nn.Linear(config.width, config.width, bias=False)
        self.wo = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = (w(x).view(b, s, self.heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(b, s, d))


class Router(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.experts, self.top, self.factor = config.experts, config.top, config.capacity_factor
        self.gate = nn.Linear(config.width, config.experts, bias=False)

    def capacity(self, seq: int) -> int:
        """Slots per sequence and expert; a multiple of 4, so that they split over small meshes."""
        return 4 * ceil(self.factor * self.top * seq / self.experts / 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [batch, seq, width] -> dispatch (0 or 1) and combine (weights), [batch, seq, experts * capacity]."""
        b, s, _ = x.shape
        capacity = self.capacity(s)
        scores = F.softmax(self.gate(x), dim=-1)
        best = scores.detach().topk(self.top, dim=-1).indices
        chosen = best.unsqueeze(-1) == torch.arange(self.experts, device=x.device)
        weights = (scores.unsqueeze(2) * chosen).sum(dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        place = chosen.flatten(1, 2).long().cumsum(dim=1).view(chosen.shape) - 1
        slot = (place.unsqueeze(-1) == torch.arange(capacity, device=x.device)) & chosen.unsqueeze(-1)
        slot = slot.to(x.dtype).flatten(3)
        return slot.sum(dim=2), (slot * weights.unsqueeze(-1)).sum(dim=2)


class Experts(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.up = nn.Parameter(torch.empty(config.experts, config.width, config.hidden))
        self.gate = nn.Parameter(torch.empty(config.experts, config.width, config.hidden))
        self.down = nn.Parameter(torch.empty(config.experts, config.hidden, config.width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.up, self.gate, self.down):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x: [experts, tokens, width], same out."""
        return torch.bmm(F.silu(torch.bmm(x, self.gate)) * torch.bmm(x, self.up), self.down)


class MixtureOfExperts(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.router = Router(config)
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        dispatch, combine = self.router(x)
        e, slots = self.config.experts, dispatch.shape[-1] // self.config.experts
        tokens = torch.bmm(dispatch.transpose(1, 2), x).view(b, e, slots, d)
        tokens = self.experts(tokens.transpose(0, 1).reshape(e, b * slots, d))
        return torch.bmm(combine, tokens.view(e, b, slots, d).transpose(0, 1).reshape(b, e * slots, d))


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config)
        self.moe_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.moe = MixtureOfExperts(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.moe(self.moe_norm(x))


class MoE(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.output = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [batch, seq] -> logits [batch, seq, vocab]."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def build(size: str = "tiny", *, batch: int | None = None, seq: int | None = None,
          **overrides) -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = replace(SIZES[size], **overrides)
    shape = (batch or 8, seq or config.context)
    if shape[1] > config.context:
        config = replace(config, context=shape[1])
    return MoE(config), (torch.randint(config.vocab, shape), torch.randint(config.vocab, shape))
