"""A model, a batch and a plan, ready to train: what train.py and passes.py time."""
from __future__ import annotations

import argparse
import copy
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import autoshard
from autoshard.base.mesh import parse_mesh
from autoshard.decide.options import Options
from autoshard.program.trace import trace
from autoshard.study.compare import comparison
from benchmarks.training.by_hand import PLANS, Trained

AUTO = ("auto", "auto-dp", "auto-ddp", "auto-inductor")
SIZES: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "gpt": {"small": ("tiny", dict(layers=4, width=512, heads=8, vocab=4096, context=128, batch=8)),
            "large": ("tiny", dict(layers=4, width=1024, heads=16, vocab=8192, context=128, batch=8)),
            "words": ("tiny", dict(layers=4, width=256, heads=4, vocab=50304, context=128, batch=8))},
    "llama": {"small": ("tiny", dict(layers=4, width=512, heads=8, kv_heads=4, hidden=1408, vocab=4096, seq=128, batch=8)),
              "large": ("tiny", dict(layers=4, width=1024, heads=16, kv_heads=8, hidden=2816, vocab=8192, seq=128, batch=8)),
              "words": ("tiny", dict(layers=4, width=256, heads=4, kv_heads=2, hidden=704, vocab=32000, seq=128, batch=8))},
    "mlp": {"small": ("tiny", dict(widths=(1024, 4096, 4096, 1024), batch=512)),
            "large": ("tiny", dict(widths=(2048, 8192, 8192, 2048), batch=1024))},
    "resnet": {"small": ("tiny", dict(width=32, image=64, classes=128, batch=32)),
               "large": ("18", dict(image=128, classes=128, batch=32))},
    "moe": {"small": ("tiny", dict(layers=2, width=512, heads=8, hidden=1024, experts=4, vocab=4096, context=128, batch=8)),
            "large": ("tiny", dict(layers=4, width=512, heads=8, hidden=2048, experts=8, vocab=8192, context=256, batch=16))},
    "vit": {"small": ("tiny", dict(layers=4, width=512, heads=8, image=96, patch=8, classes=128, batch=16)),
            "large": ("tiny", dict(layers=6, width=768, heads=12, image=128, patch=8, classes=1024, batch=32))},
    "dlrm": {"small": ("small", dict(rows=10_000, top=(1024, 1024, 512, 256), batch=2048)),
             "large": ("small", dict(rows=20_000, top=(1024, 1024, 512, 256), batch=8192))},
    "bert": {"small": ("tiny", dict(layers=4, width=512, heads=8, vocab=4096, context=128, batch=8))},
    "t5": {"small": ("tiny", dict(layers=3, width=512, heads=8, head_dim=64, hidden=1024, vocab=4096, context=128, batch=8))},
}
"""Arguments of models.<model>.build. "large": communication should hardly show. "words": the vocabulary of GPT-2 and of Llama 2
on a small body, which is how small language models are."""


class Contender:
    """A plan ready to train."""

    def __init__(self, name: str, trained: Trained, fused: bool) -> None:
        self.name, self.trained = name, trained
        kinds: dict[type, list[nn.Parameter]] = {}  # a fused update takes DTensors or tensors, not both
        for p in trained.model.parameters():
            kinds.setdefault(type(p.data), []).append(p)
        optimizer = torch.optim.AdamW([{"params": some} for some in kinds.values()], lr=1e-3, fused=fused)
        self.optimizer = autoshard.local_update(optimizer) if name.startswith("auto") else optimizer
        self.losses: list[float] = []

    def step(self) -> None:
        self.optimizer.zero_grad()
        with self.trained.around():
            self.loss = self.trained.loss()
            self.loss.backward()
        self.optimizer.step()

    def train(self, steps: int) -> None:
        """Steps whose losses are kept, as means over the global batch."""
        for _ in range(steps):
            self.step()
            value = self.loss.detach()
            value = value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
            if self.trained.shards and dist.is_initialized():
                dist.all_reduce(value)
                value /= dist.get_world_size()
            self.losses.append(value.item())

    def stored(self) -> int:
        """Bytes this rank holds between steps: weights, buffers, optimizer state."""
        tensors = [*self.trained.model.parameters(), *self.trained.model.buffers()]
        tensors += [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        return sum(getattr(t, "_local_tensor", t).nbytes for t in {id(t): t for t in tensors}.values())


def subject(model: str, size: str, batch: int | None = None) -> tuple[nn.Module, tuple[torch.Tensor, ...], Callable]:
    """(model, global batch, loss function), the same on every rank."""
    module = importlib.import_module(f"models.{model}")
    name, sizes = SIZES[model][size]
    torch.manual_seed(0)
    return *module.build(name, **{**sizes, **({"batch": batch} if batch else {})}), module.loss


def contender(name: str, kind: str, model: nn.Module, batch: tuple[torch.Tensor, ...], loss: Callable, mesh: DeviceMesh,
              options: argparse.Namespace) -> Contender | None:
    """None where no such plan is written for the model. `options`: `fused`, `cluster`."""
    model = copy.deepcopy(model)
    if name.startswith("auto"):
        compiled = autoshard.compile(model, mesh, batch, loss_fn=loss, cluster=options.cluster, cache=False,
                                     seeds=_seeds(name, batch, mesh), backend="inductor" if name == "auto-inductor" else "eager",
                                     plan=ddp_plan(model, batch, loss, mesh, options) if name == "auto-ddp" else None)
        return Contender(name, Trained(compiled, lambda: compiled(*batch), False), options.fused)
    trained = PLANS[name](model, kind, mesh, batch, loss)
    return None if trained is None else Contender(name, trained, options.fused)


def _seeds(name: str, batch: tuple[torch.Tensor, ...], mesh: DeviceMesh) -> dict[str, Any]:
    if name != "auto-dp":
        return {}
    return {**{f"input:{i}": [Shard(0)] * mesh.ndim for i in range(len(batch))}, "*": [Replicate()] * mesh.ndim}


def ddp_plan(model: nn.Module, batch: tuple[torch.Tensor, ...], loss: Callable, mesh: DeviceMesh, options: argparse.Namespace) -> autoshard.Plan:
    """DDP's layout as a plan: every op on the rank's part of the batch, every gradient reduced as a whole."""
    traced = trace(model, batch, loss_fn=loss, training=True)
    on = parse_mesh(",".join(f"{name}={size}" for name, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True)))
    found = comparison(traced, on, Options(cluster=options.cluster or "cpu-gloo"), has_loss=True)
    return next(c.plan for c in found.contenders if c.name == "DDP")
