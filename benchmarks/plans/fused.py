"""Unfriendly dims: what transformers' GPT-2 (q|k|v in one weight, a vocabulary of 50,257) costs beside a twin whose weight has heads
first, which any plan can split by heads, and beside itself planned without dims made of parts, and with dims that do not divide left whole.

    python -m benchmarks.plans.fused [--layers 2] [--batch 2] [--seq 1024] [--vocab 50257] [--mesh tp=4 tp=8]

Predicted steps of the profile h100-dgx in bf16, and what is searched in each: a plan and its gap. Times are planning CPU seconds.
"""
from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoshard.api import mesh_of
from autoshard.base.plan import Plan
from autoshard.decide.options import Options
from autoshard.decide.phase_timer import cpu_seconds
from autoshard.padding.padded import padded
from autoshard.planner.stages import plan_traced
from autoshard.program.load import load_model
from autoshard.program.trace import trace
from autoshard.rules.part_dims import without_parts

MEDIUM = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_head": 16, "n_embd": 1024, "n_positions": 1024}


class HeadsFirst(nn.Module):
    """A fused projection whose features are [heads, q|k|v, head]; what it returns splits as the attention asks."""

    def __init__(self, projection: nn.Module, heads: int) -> None:
        super().__init__()
        self.projection, self.heads = projection, heads

    def forward(self, x: torch.Tensor) -> Any:
        return _Parts(self.projection(x), self.heads)


class _Parts:
    def __init__(self, x: torch.Tensor, heads: int) -> None:
        self.x, self.heads = x, heads

    def split(self, size: int, dim: int) -> tuple[_Part, ...]:
        return tuple(_Part(x, size) for x in self.x.unflatten(dim, (self.heads, 3, -1)).unbind(dim + 1))


class _Part:
    """[batch, seq, heads, head], which the attention takes for [batch, seq, features] and asks to view as what it is."""

    def __init__(self, x: torch.Tensor, features: int) -> None:
        self.x, self.shape = x, (*x.shape[:2], features)

    def view(self, *shape: Any) -> torch.Tensor:
        return self.x


def traced(config: dict[str, Any], batch: int, seq: int, heads_first: bool) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        spec = load_model(None, batch=batch, seq=seq, dtype="bf16", hf=str(path))
    if heads_first:
        for layer in [m for m in spec.model.modules() if hasattr(m, "c_attn")]:
            layer.c_attn = HeadsFirst(layer.c_attn, config["n_head"])
    return trace(spec.model, spec.example_inputs, spec.example_kwargs, loss_fn=spec.loss_fn), spec.loss_fn is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("--layers", 2), ("--batch", 2), ("--seq", 1024), ("--vocab", 50257)):
        parser.add_argument(name, type=int, default=value)
    parser.add_argument("--mesh", nargs="+", default=["tp=4", "tp=8"])
    args = parser.parse_args()
    config = {**MEDIUM, "n_layer": args.layers, "vocab_size": args.vocab}
    fused, has_loss = traced(config, args.batch, args.seq, heads_first=False)
    twin, _ = traced(config, args.batch, args.seq, heads_first=True)
    for mesh in args.mesh:
        wide = padded(fused, mesh_of(mesh))
        forms = {"heads first": padded(twin, mesh_of(mesh)), "q|k|v": wide, "q|k|v, nothing padded": fused,
                 "q|k|v, parts not seen": replace(wide, graph=without_parts(wide.graph))}
        for name, form in forms.items():
            start = cpu_seconds()
            plan: Plan = plan_traced(form, mesh_of(mesh), Options(time_limit=300.0), has_loss=has_loss)
            print(f"{mesh}  {name:22s} {plan.objective_s * 1e3:8.4f} ms  {plan.status}, gap {plan.gap:.1e}, {cpu_seconds() - start:.1f} CPU s", flush=True)


if __name__ == "__main__":
    main()
