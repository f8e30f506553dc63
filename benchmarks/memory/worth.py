"""The price of memory held against plans made from the start: of each model a budget that binds, a step of it more and less.

    python -m benchmarks.memory.worth                           # five models on four ranks, as a table
    python -m benchmarks.memory.worth --models gpt --share 0.6

`priced` is what `autoshard.Planner.worth` says, with all kept that three plans of one model share; `solved` is the difference of two plans that
`autoshard.plan` makes of a new model. They differ where a search is not proven optimal and found something else from where it started.
"""
from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

import torch

import autoshard
from autoshard.base import quantities
from autoshard.decide.phase_timer import cpu_seconds

MODELS = ("gpt", "llama", "bert", "t5", "moe")
MIB = 2**20


def call(name: str, batch: int) -> dict[str, Any]:
    module = importlib.import_module(f"models.{name}")
    with torch.device("meta"):
        model, inputs = module.build("tiny", batch=batch)
    return {"model": model, "example_inputs": inputs, "loss_fn": module.loss}


def row(name: str, options: argparse.Namespace) -> tuple[str, float]:
    """The line of a model, and by how much its prices differ."""
    asked = {"time_limit": options.time_limit, "cluster": options.cluster}
    planner, start = autoshard.Planner(**call(name, options.batch), **asked), cpu_seconds()
    peak = planner.plan(options.mesh).memory["total"]
    budget, step = options.share * peak, options.step * peak
    plan = planner.worth(options.mesh, step=step, memory_budget=budget)
    priced_s = cpu_seconds() - start
    solved = [autoshard.plan(**call(name, options.batch), mesh=options.mesh, memory_budget=budget + sign * step, **asked) for sign in (-1, 1)]
    difference = (solved[0].objective_s - solved[1].objective_s) / (2 * step) * MIB
    priced = (plan.worth.gib_s or 0.0) / 1024
    off = abs(priced - difference) / abs(difference) if difference else float(priced != 0)
    return (f"| {name} | {quantities.size(peak)} | {quantities.size(budget)} +- {quantities.size(step)} | {quantities.seconds(plan.objective_s)} | "
            f"{100 * plan.gap:.1f} % | {quantities.seconds(priced)} | {quantities.seconds(difference)} | {100 * off:.1f} % | {priced_s:.0f} |"), off


def main() -> int:
    parser = argparse.ArgumentParser(description="The price of memory beside the difference of two plans.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--mesh", default="dp=4")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--cluster", default="h100-dgx")
    parser.add_argument("--share", type=float, default=0.85, help="of what the fastest plan takes: the budget")
    parser.add_argument("--step", type=float, default=0.1, help="of it: more and less")
    parser.add_argument("--time-limit", type=float, default=60.0)
    options = parser.parse_args()
    print("| model | fastest takes | budget | step | gap | priced, a MiB | solved, a MiB | differ | CPU s priced |\n" + "|---" * 9 + "|")
    worst = 0.0
    for name in options.models:
        text, off = row(name, options)
        print(text, flush=True)
        worst = max(worst, off)
    return int(worst > 0.1)


if __name__ == "__main__":
    sys.exit(main())
