"""What a call of a new length costs a rank, where two others were lowered before, and how memory grows over many lengths.

    torchrun --nproc-per-node 2 -m benchmarks.runtime.many_lengths gpt:124m --batch 4 --lengths 256,128,240,200,136,250
    torchrun --nproc-per-node 2 -m benchmarks.runtime.many_lengths llama:tiny --lengths 400,16 --random 300
    torchrun --nproc-per-node 2 -m benchmarks.runtime.many_lengths llama:1b --dtype bf16 --no-steps --batch 1 --lengths 512,128,480,300,136

CPU seconds of `prepare`, on the first rank: traced, priced and lowered for the first two lengths; the third one also traces with an open size,
once. `--random`: so many lengths between the least and the largest, a step of each; prints the process's resident memory, and how much of it is
shared with the other ranks. `--no-steps`: prepares alone, for a model whose gradients do not fit here.
"""
from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist

import autoshard
from autoshard.program.load import load_model


def resident() -> str:
    """Memory of this process."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    mib = {words[0]: int(words[1]) // 1024 for words in lines if words[0] in ("VmRSS:", "RssShmem:")}
    return f"{mib['VmRSS:']} MiB, {mib['RssShmem:']} of them shared"


def batch_of(given: argparse.Namespace, length: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(length)
    return [torch.randint(200, (given.batch, length), generator=made) for _ in range(2)]


def tell(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def step(model: torch.nn.Module, batch: list[torch.Tensor]) -> str:
    loss = model(*batch)
    loss.backward()
    model.zero_grad()
    return f"loss {loss.item():.6f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="gpt:tiny")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lengths", default="32,16,24,20,28")
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--dtype", help="bf16, fp32 or fp64, of the whole model")
    parser.add_argument("--no-steps", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    lengths = list(map(int, given.lengths.split(",")))
    between = range(min(lengths) + 1, max(lengths))
    drawn = random.Random(0).choices(between, k=given.random)
    spec = load_model(given.model, batch=given.batch, seq=max(lengths), dtype=given.dtype)
    model = autoshard.compile(spec.model, f"d={dist.get_world_size()}", loss_fn=spec.loss_fn, cluster="cpu-gloo", cache=False)
    for i, length in enumerate([*lengths, *drawn]):
        batch = batch_of(given, length)
        begin = time.process_time()
        model.prepare(*batch)
        took = time.process_time() - begin
        loss = "no step" if given.no_steps else step(model, batch)
        if i < len(lengths) or i % 25 == 0:
            tell(f"call {i}, length {length}: {took:.3f} CPU s, {type(model._current).__name__}, {loss}, {resident()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
