"""A trainer in the shape of torchtitan's: a config, a loader that can go on, steps with clipping and a schedule, checkpoints; resume on another mesh.

    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/torchtitan_like.py --steps 4 --folder run
    python examples/torchtitan_like.py --steps 8 --folder run            goes on from step 4 in one process

`torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400` starts it on two nodes; nothing else changes. With
`--nnodes 1:2 --max-restarts 3` torchrun starts it anew on what is left when a node is lost: the plan is searched for the new mesh, and the checkpoint
is cut anew.
"""
from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import autoshard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `models` lies beside this folder
from models import gpt  # noqa: E402

BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
"""The optimizer's state under names of parameters, so that a pipeline can resume from another one's."""


@dataclass(frozen=True)
class Config:
    """One run. `batch`: sequences of all ranks together; `mesh`: "" for one axis over all ranks."""

    steps: int = 20
    batch: int = 8
    lr: float = 1e-3
    warmup: int = 2
    max_norm: float = 1.0
    save_every: int = 4
    folder: Path = Path("run")
    mesh: str = ""
    cluster: str = "cpu-gloo"
    seed: int = 0


class Loader:
    """Batches that depend on their number alone, so that a run on other ranks goes on with the same ones."""

    def __init__(self, config: Config) -> None:
        self.config, self.at = config, 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            g = torch.Generator().manual_seed(self.config.seed * 100_003 + self.at)
            ids = torch.randint(256, (self.config.batch, 33), generator=g).cumsum(1) % 256
            self.at += 1
            yield ids[:, :-1], ids[:, 1:]


class Trainer:
    """Model, optimizer, schedule and loader, and what a checkpoint of them is."""

    def __init__(self, config: Config) -> None:
        torch.manual_seed(config.seed)
        self.config, self.loader, self.step = config, Loader(config), 0
        model, (ids, target) = gpt.build("tiny", batch=config.batch)
        mesh = config.mesh or f"dp={os.environ.get('WORLD_SIZE', '1')}"
        self.model = autoshard.compile(model, mesh, (ids, target), loss_fn=gpt.loss, cluster=config.cluster)
        self.optimizer = autoshard.local_update(torch.optim.AdamW(self.model.parameters(), lr=config.lr))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: min(1.0, (n + 1) / config.warmup))

    def state(self) -> dict[str, Any]:
        weights, state = get_state_dict(self.model, self.optimizer, options=BY_NAME)
        return {"model": weights, "optimizer": state, "schedule": self.schedule.state_dict(), "loader": self.loader.at, "step": self.step,
                "rng": self.model.get_rng_state()}

    def save(self) -> None:
        dcp.save(self.state(), checkpoint_id=self.config.folder / f"step-{self.step}")

    def resume(self) -> None:
        """From the last checkpoint, whatever mesh it was written on."""
        found = sorted(self.config.folder.glob("step-*/.metadata"), key=lambda p: int(p.parent.name.removeprefix("step-")))
        if not found:
            return
        saved = self.state()
        dcp.load(saved, checkpoint_id=found[-1].parent)
        set_state_dict(self.model, self.optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"], options=BY_NAME)
        self.schedule.load_state_dict(saved["schedule"])
        self.model.set_rng_state(saved["rng"])
        self.loader.at, self.step = saved["loader"], saved["step"]
        ranks = self.model.plan.mesh.size
        say(f"on {ranks} rank{'s' * (ranks > 1)}, from step {self.step}")

    def train(self) -> None:
        for ids, target in self.loader:
            if self.step >= self.config.steps:
                return
            loss = self.model(ids, target)
            loss.backward()
            autoshard.clip_grad_norm_(self.model, self.config.max_norm)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.step += 1
            say(f"step {self.step}  loss {loss.item():.6f}")
            if self.step % self.config.save_every == 0:
                self.save()


def say(line: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in vars(Config()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    trainer = Trainer(Config(**vars(parser.parse_args())))
    trainer.resume()
    trainer.train()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
