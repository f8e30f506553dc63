"""Trains models/gpt.py on one fixed batch: in one process, or sharded over the processes of torchrun.

    python examples/train_gpt.py
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/train_gpt.py

Both start from the same weights and see the same batches, so their losses agree.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `models` lies beside this folder
from models import gpt  # noqa: E402

MODEL = {"layers": 4, "width": 256, "heads": 8, "vocab": 4096, "context": 128}
BATCH = 8


def train(steps: int) -> dict[str, object]:
    """Returns {"losses": [per step], "seconds": median seconds of a step, "mesh": text}."""
    torch.manual_seed(0)
    model, (ids, target) = gpt.build("tiny", batch=BATCH, **MODEL)
    mesh = "one process"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        import autoshard

        mesh = f"d={os.environ['WORLD_SIZE']}"
        model = autoshard.compile(model, mesh, (ids, target), loss_fn=gpt.loss, cluster="cpu-gloo")
        loss_of = model
    else:
        def loss_of(ids, target):
            return gpt.loss(model(ids), target)

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses, seconds = [], []
    for _ in range(steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of(ids, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    return {"losses": losses, "seconds": sorted(seconds)[len(seconds) // 2], "mesh": mesh}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--result", type=Path, help="write losses and seconds here as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)  # one process per core: comparisons stay fair
    distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if distributed:
        dist.init_process_group("gloo")
    try:
        result = train(options.steps)
        if not distributed or dist.get_rank() == 0:
            for step, loss in enumerate(result["losses"]):
                print(f"step {step:3d}  loss {loss:.6f}")
            if options.result:
                options.result.write_text(json.dumps(result))
    finally:
        if distributed:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
