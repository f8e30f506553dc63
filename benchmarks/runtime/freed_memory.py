"""A training step on a CPU whose freed memory stays with the process, over one that gives it back to the system, as glibc does by itself.

    python -m benchmarks.runtime.freed_memory [--models resnet,mlp,gpt] [--rounds 5]

One process, one thread, the model of `benchmarks/simulation/simulation.py` compiled for one device, AdamW. Rounds start a process for each kind in turn, the other one first
each time; said are medians over rounds of the CPU seconds of a step (the lower quartile of 20), and of the pages that the system fills in a step.
"""
from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from statistics import median, quantiles

from benchmarks.shared.about import about, line, markdown

GLIBCS_OWN = {"GLIBC_TUNABLES": "glibc.malloc.check=0"}  # changes nothing, and autoshard leaves what a user has set
STEPS, BEFORE = 20, 5


def measured(name: str) -> tuple[float, float]:
    """(CPU seconds, pages) of a step, in this process."""
    import torch

    import autoshard
    from benchmarks.simulation.simulation import MODELS, training_step

    torch.set_num_threads(1)
    module, sizes = MODELS[name]
    model, batch = module.build("tiny", **sizes)
    step = training_step(autoshard.compile(model, "one=1", batch, loss_fn=module.loss, cluster="cpu-gloo", cache=False, time_limit=5), batch)
    for _ in range(BEFORE):
        step()
    seconds, pages = [], resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(STEPS):
        start = time.process_time()
        step()
        seconds.append(time.process_time() - start)
    return quantiles(seconds, n=4)[0], (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - pages) / STEPS


def in_process(name: str, environment: dict[str, str]) -> tuple[float, float]:
    """The same in a new process."""
    done = subprocess.run([sys.executable, "-m", __spec__.name, "--one", name], env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True)
    seconds, pages = json.loads(done.stdout.splitlines()[-1])
    return seconds, pages


def row(name: str, rounds: int) -> tuple[str, ...]:
    kept, given_back = [], []
    for i in range(rounds):
        for into, environment in ((kept, {}), (given_back, GLIBCS_OWN))[::1 if i % 2 else -1]:
            into.append(in_process(name, environment))
        print(f"{name}: round {i + 1} of {rounds}", file=sys.stderr, flush=True)
    ratios = [a / b for (a, _), (b, _) in zip(kept, given_back, strict=True)]
    (s_kept, pages_kept), (s_given, pages_given) = (tuple(map(median, zip(*found, strict=True))) for found in (kept, given_back))
    return (name, f"{1e3 * s_kept:.1f}", f"{1e3 * s_given:.1f}", f"{median(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}]", f"{pages_kept:,.0f}",
            f"{pages_given:,.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet,mlp,gpt,llama,vit,bert", help="of benchmarks/simulation/simulation.py")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measured(asked.one)))
        return
    found = [row(name, asked.rounds) for name in asked.models.split(",")]
    print(f"\n{line(about(), f'{asked.rounds} rounds')}\n")
    print(markdown(("model", "kept, CPU ms", "given back, CPU ms", "ratio [least, most]", "pages, kept", "pages, given back"), found))


if __name__ == "__main__":
    main()
