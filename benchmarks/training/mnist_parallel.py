"""The classic small experiment: an MLP 784-512-512-10 on handwritten digits, batch 32, on two processes.

    torchrun --nproc-per-node 2 -m benchmarks.training.mnist_parallel --json mnist.json
    torchrun --nproc-per-node 2 -m benchmarks.training.mnist_parallel --carrier gloo

Ten epochs. Four runs of the same training: no parallelism (one process), tensor parallelism by propagation from one seed (the first
layer split by columns), two pipeline stages with the cut that is searched (layer 1 | layers 2, 3), and the plan autoshard searches. An epoch is
1,875 steps, as 60,000 images make.
Published for two GPUs and 10 epochs: 3.90 minutes without parallelism, 2.57 with tensor parallelism (0.66 of it), 2.81 with a pipeline (0.72).
Layer 1 has 60 % of the multiply-adds, so no pipeline can take less than 0.60 of one process.
The two processes are on one machine: what they send goes through memory they share, or with `--carrier gloo` through gloo's messages, as between machines.

The digits are the 1,797 real ones that scikit-learn ships (8 x 8 scans from the UCI repository, enlarged to 28 x 28 here,
1,500 to train on and 297 to test): `pip install 'autoshard[bench]'`.
"""
from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import autoshard
from autoshard.runtime.ranks.freed_memory import keep_freed_memory
from benchmarks.shared.about import about, line, markdown
from benchmarks.shared.carrier import add_carrier, take_carrier
from models import mlp

STEPS = 1875
TRAIN = 1500
PUBLISHED = {"none (one process)": (3.90, 1.0), "tensor, propagated": (2.57, 0.66), "pipeline": (2.81, 0.72)}
"""Minutes, and their ratio to those without parallelism."""


@dataclass(frozen=True)
class Run:
    """`losses`: mean over each epoch; `split`: parameters that the plan splits, or the stages of a pipeline."""

    how: str
    minutes: float
    ms_per_step: float
    accuracy: float
    losses: list[float]
    split: list[str]


def digits() -> tuple[Tensor, Tensor]:
    """Images [1797, 784] scaled to mean 0 and deviation 1, labels [1797]; in a fixed random order."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("this benchmark needs scikit-learn, which ships the digits; pip install 'autoshard[bench]'")
    found = load_digits()
    small = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1)
    large = F.interpolate(small, size=(28, 28), mode="bilinear", align_corners=False).flatten(1)
    order = torch.randperm(len(large), generator=torch.Generator().manual_seed(0))
    return ((large - large.mean()) / large.std())[order], torch.tensor(found.target)[order]


def batches(images: Tensor, labels: Tensor, batch: int, steps: int, seed: int):
    """`steps` random batches of the training images."""
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randint(TRAIN, (batch,), generator=g)
        yield images[chosen], labels[chosen]


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return (model(images[TRAIN:]).argmax(dim=1) == labels[TRAIN:]).float().mean().item()


def train(how: str, loss_of, model: nn.Module, data: tuple[Tensor, Tensor], options: argparse.Namespace) -> Run:
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
    losses = []
    start = time.perf_counter()
    for epoch in range(options.epochs):
        total = torch.zeros(())
        for x, y in batches(*data, options.batch, options.steps, epoch):
            loss = loss_of(x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        losses.append(total.item() / options.steps)
    seconds = time.perf_counter() - start
    plan = getattr(model, "plan", None)
    split = [n for n, spec in plan.placements.items() if any(p >= 0 for p in spec)] if plan else []
    split = [f"{s.first} to {s.last}" for s in plan.stages] if plan and plan.pipeline else split
    tested = copy.deepcopy(mlp.build("base")[0])
    weights = {n: p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach() for n, p in model.named_parameters()}
    tested.load_state_dict(of_all_stages(weights) if plan and plan.pipeline else weights)
    return Run(how, seconds / 60, 1e3 * seconds / options.epochs / options.steps, accuracy(tested, *data), losses, split)


def of_all_stages(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every rank has those of its stages."""
    found: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, weights)
    return {n: t for part in found for n, t in part.items()}


def runs(options: argparse.Namespace) -> list[Run]:
    data, out = digits(), []
    torch.manual_seed(0)
    model, _ = mlp.build("base", batch=options.batch)
    if dist.get_rank() == 0:
        alone = copy.deepcopy(model)
        out.append(train("none (one process)", lambda x, y: mlp.loss(alone(x), y), alone, data, options))
    dist.barrier()
    example = next(batches(*data, options.batch, 1, 0))
    for how, seeds, search in (("tensor, propagated", {"layers.0.weight": ("d", None)}, "propagate"), ("searched", {}, "auto")):
        compiled = autoshard.compile(copy.deepcopy(model), f"d={dist.get_world_size()}", example, loss_fn=mlp.loss, optimizer="sgd",
                                     seeds=seeds, search=search, cluster=options.cluster, cache=False)
        out.append(train(how, compiled, compiled, data, options))
    staged = autoshard.compile(copy.deepcopy(model), f"pp={dist.get_world_size()}", example, loss_fn=mlp.loss, optimizer="sgd", cache=False,
                               cluster=options.cluster or "cpu-gloo", pipeline=autoshard.Pipeline(options.microbatches, options.schedule))
    out.insert(-1, train("pipeline", staged, staged, data, options))
    if dist.get_world_size() == 2 and staged.plan.pipeline["options"]["cuts"] != ["layers.1"]:
        sys.exit(f"the pipeline was cut at {staged.plan.pipeline['options']['cuts']}, and layer 1 | layers 2, 3 is the best of two cuts")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    add_carrier(parser)
    parser.add_argument("--steps", type=int, default=STEPS, help="per epoch")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--microbatches", type=int, default=2, help="of the pipeline; they divide the batch")
    parser.add_argument("--schedule", default="1f1b", help="of the pipeline")
    parser.add_argument("--cluster", help="profile to plan for (default: by the device)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        parser.error("start with `torchrun --nproc-per-node 2 -m benchmarks.training.mnist_parallel ...`")
    torch.set_num_threads(1)
    take_carrier(options.carrier)
    keep_freed_memory()  # for the run without autoshard too
    dist.init_process_group("gloo")
    try:
        found = runs(options)
        if dist.get_rank() == 0:
            show(found, options)
    finally:
        dist.destroy_process_group()


def show(found: list[Run], options: argparse.Namespace) -> None:
    facts = about()
    base = found[0].ms_per_step
    rows = [(r.how, f"{r.minutes:.2f}", f"{r.ms_per_step:.2f}", f"{r.ms_per_step / base:.2f}", *PUBLISHED.get(r.how, ("-", "-")), f"{r.accuracy:.1%}", f"{r.losses[-1]:.6f}", ", ".join(r.split) or "nothing")
            for r in found]
    columns = ("parallelism", "minutes", "ms/step", "ratio", "published minutes", "published ratio", "accuracy", "loss of the last epoch", "split")
    print(f"{line(facts, f'{dist.get_world_size()} processes', f'{options.epochs} epochs of {options.steps} steps', f'over {options.carrier}')}\n\n{markdown(columns, rows)}")
    if options.json:
        options.json.write_text(json.dumps({**facts, "carrier": options.carrier, "steps": options.steps, "runs": [asdict(r) for r in found]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
