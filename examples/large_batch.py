"""Data parallelism with a larger batch, and the same accuracy: the linear scaling rule with warm-up (arXiv 1706.02677).

    python examples/large_batch.py                                                    one process, batch 32
    torchrun --nproc-per-node 2 examples/large_batch.py --batch 256                   two processes, eight times the batch
    python examples/large_batch.py --table                                            batches 32, 256, 512, with and without warm-up, five seeds

The learning rate grows with the batch, reached step by step over the first epochs; everything else stays. An epoch
has fewer, larger steps, so the collectives of data parallelism are paid less often. Needs scikit-learn for its digits.
"""
from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `models` and `benchmarks` lie beside this folder

import autoshard  # noqa: E402
from benchmarks.training.mnist_parallel import TRAIN, accuracy, batches, digits  # noqa: E402
from models import mlp  # noqa: E402

BASE = 32
LR = 0.02
SEEDS = 5
ROWS = ((32, 0), (256, 0), (256, 5), (512, 0), (512, 5))  # batch, epochs of warm-up


def train(batch: int, epochs: int, warmup: int, seed: int = 0) -> float:
    """Accuracy on the test images. `seed` decides the first weights and the order of images."""
    images, labels = digits()
    torch.manual_seed(seed)
    model, _ = mlp.build("base", batch=batch)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    compiled = autoshard.compile(model, f"dp={world}", next(batches(images, labels, batch, 1, 0)), loss_fn=mlp.loss, optimizer="sgd")
    steps = TRAIN // batch
    optimizer = torch.optim.SGD(compiled.parameters(), lr=LR)
    target, ramp = LR * batch / BASE, warmup * steps
    for epoch in range(epochs):
        for i, (x, y) in enumerate(batches(images, labels, batch, steps, epoch + 1000 * seed)):
            done = min(1.0, (epoch * steps + i + 1) / max(ramp, 1))
            optimizer.param_groups[0]["lr"] = LR + (target - LR) * done
            optimizer.zero_grad()
            compiled(x, y).backward()
            optimizer.step()
    whole = mlp.build("base")[0]
    whole.load_state_dict({n: p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach() for n, p in compiled.named_parameters()})
    return accuracy(whole, images, labels)


def table(epochs: int, rows=ROWS, seeds: int = SEEDS) -> list[tuple[int, int, list[float]]]:
    """(batch, warm-up, accuracy per seed) of every row."""
    return [(batch, warmup, [train(batch, epochs, warmup, seed) for seed in range(seeds)]) for batch, warmup in rows]


def show(found: list[tuple[int, int, list[float]]]) -> str:
    """Means with the least and the most, and how far the mean is from the first row's, in points."""
    base = sum(found[0][2]) / len(found[0][2])
    lines = ["| batch | learning rate | warm-up | accuracy | least .. most | points to batch 32 |", "| --- | --- | --- | --- | --- | --- |"]
    for batch, warmup, each in found:
        mean = sum(each) / len(each)
        warm = f"{warmup} epochs" if warmup else "none"
        lines.append(f"| {batch} | {LR * batch / BASE:g} | {warm} | {mean:.2%} | {min(each):.1%} .. {max(each):.1%} | {100 * (mean - base):+.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="all batches, with and without warm-up")
    parser.add_argument("--batch", type=int, default=BASE)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=5, help="epochs until the full learning rate")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.table:
        found = table(options.epochs)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(show(found))
        return
    found = train(options.batch, options.epochs, options.warmup)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"batch {options.batch}, learning rate {LR * options.batch / BASE:g}: {found:.1%} of the test images")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
