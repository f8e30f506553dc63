"""Models of this repository, traced at a micro-batch, with their weights and a whole batch."""
from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard.pipeline.cutting.blocks import Blocks
from autoshard.program.calling import Traced
from autoshard.program.trace import trace
from models import bert, dlrm, gpt, llama, moe, t5, vit

MODELS = {"gpt": gpt, "llama": llama, "bert": bert, "vit": vit, "t5": t5, "moe": moe, "dlrm": dlrm}
SEQ = 8


@dataclass(frozen=True, eq=False)
class Subject:
    model: nn.Module
    batch: tuple[torch.Tensor, ...]
    loss: Any
    traced: Traced

    def parts(self, m: int) -> list[tuple[torch.Tensor, ...]]:
        """The batch as `m` micro-batches."""
        return list(zip(*(t.chunk(m) for t in self.batch), strict=True))

    @property
    def state(self) -> dict[str, torch.Tensor]:
        found = {n: t.detach() for n, t in (*self.model.named_parameters(), *self.model.named_buffers())}
        return {**found, **self.traced.calling.constants}


def even_cuts(what: Subject, stages: int) -> tuple[str, ...]:
    """As many blocks in each stage: for tests of what becomes of cuts, and not of their search, which plans every stretch."""
    names = Blocks.of(what.traced.graph).names
    return tuple(names[len(names) * k // stages] for k in range(1, stages))


def subject(name: str, batch: int = 8, microbatches: int = 4, **sizes: Any) -> Subject:
    """In float64, with noise on vectors, so that no gradient is zero in exact arithmetic."""
    torch.manual_seed(zlib.crc32(name.encode()))
    module = MODELS[name]
    lengths = {"seq": SEQ} if name in ("gpt", "llama", "bert", "moe", "t5") else {}
    model, inputs = module.build(batch=batch, **lengths, **sizes)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(torch.randn(p.shape) * 0.1)
    model = model.double()
    inputs = tuple(t.double() if t.is_floating_point() else t for t in inputs)
    traced = trace(model, tuple(t[:batch // microbatches] for t in inputs), {}, loss_fn=module.loss)
    return Subject(model, inputs, module.loss, traced)
