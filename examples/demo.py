"""`make demo`: plan models/gpt.py for two local processes, then train it with that plan beside one process."""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from train_gpt import BATCH, MODEL

import autoshard
from autoshard.report.tables import report_console
from autoshard.report.text import show
from models import gpt

TRAIN = Path(__file__).with_name("train_gpt.py")
KEPT = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
"""What autoshard asks of the allocator on CPUs (docs/runtime.md), for the process without autoshard too: else it would be slower for that alone."""


def plan(ranks: int) -> autoshard.Plan:
    with torch.device("meta"):  # planning needs shapes, not weights
        model, inputs = gpt.build("tiny", batch=BATCH, **MODEL)
    return autoshard.plan(model, f"d={ranks}", inputs, loss_fn=gpt.loss, cluster="cpu-gloo",
                          model_info={"reference": "models/gpt.py", "batch": BATCH, **MODEL})


def train(launcher: list[str], steps: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, *launcher, str(TRAIN), "--steps", str(steps), "--result", str(result)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**KEPT, **os.environ})
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed with exit code {done.returncode}\n{done.stdout}")
        return json.loads(result.read_text())


def compare(one: dict, many: dict, ranks: int, console: Console) -> float:
    """Prints both runs side by side; returns the largest difference of a loss."""
    table = Table("step", "one process", f"{ranks} processes", "difference", title="Loss")
    differences = [abs(a - b) for a, b in zip(one["losses"], many["losses"], strict=True)]
    for step, (a, b, d) in enumerate(zip(one["losses"], many["losses"], differences, strict=True)):
        table.add_row(str(step), f"{a:.6f}", f"{b:.6f}", f"{d:.1e}")
    console.print(table)
    console.print(f"largest difference: {max(differences):.2e}")
    console.print(f"median step: {one['seconds'] * 1e3:.1f} ms in one process, {many['seconds'] * 1e3:.1f} ms in {ranks}; "
                  f"time ratio {many['seconds'] / one['seconds']:.2f} (below 1 is faster)")
    return max(differences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    console = report_console()
    show(plan(options.ranks), console)
    console.print(f"Training {options.steps} steps in one process, then in {options.ranks} ...")
    one = train([], options.steps)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    many = train(launcher, options.steps)
    if compare(one, many, options.ranks, console) > 1e-3:
        sys.exit("the losses differ by more than float32 rounding explains")


if __name__ == "__main__":
    main()
