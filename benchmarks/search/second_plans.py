"""Plans of one model for several batches by one `autoshard.Planner`, held against plans made from the start.

    python -m benchmarks.search.second_plans                                   # llama 8B, dp=8,tp=8, 16 x 8192, then 32, 24 and 8 rows
    python -m benchmarks.search.second_plans gpt --size tiny --mesh dp=4 --rows 64,32,48 --seq 0

Prints per batch the CPU seconds of the planner, those of a plan from the start, their ratio, and the step over that of a plan from the start (1: as
good; both are proven optimal where the gaps say 0).
"""
from __future__ import annotations

import argparse
from importlib import import_module

import torch

import autoshard
from autoshard.decide.phase_timer import cpu_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="llama")
    parser.add_argument("--size", default="8B")
    parser.add_argument("--mesh", default="dp=8,tp=8")
    parser.add_argument("--rows", default="16,32,24,8", help="of the batches, in order")
    parser.add_argument("--seq", type=int, default=8192, help="0: the model's own")
    parser.add_argument("--cluster", default="h100-dgx")
    args = parser.parse_args()
    module, rows = import_module(f"models.{args.model}"), [int(n) for n in args.rows.split(",")]
    with torch.device("meta"):
        built = [module.build(args.size, batch=n, **({"seq": args.seq} if args.seq else {})) for n in rows]
    model, calls = built[0][0].to(torch.bfloat16), [inputs for _, inputs in built]
    options = {"loss_fn": module.loss, "cluster": args.cluster}
    planner = autoshard.Planner(model, calls[0], **options)
    print(f"{'rows':>6} {'CPU s':>7} {'anew':>7} {'ratio':>6} {'over anew':>12}  gaps")
    for n, call in zip(rows, calls, strict=True):
        start = cpu_seconds()
        plan = planner.plan(args.mesh, call)
        middle = cpu_seconds()
        anew = autoshard.plan(model, args.mesh, call, **options)
        seconds, whole = middle - start, cpu_seconds() - middle
        print(f"{n:6} {seconds:7.2f} {whole:7.2f} {seconds / whole:6.2f} {plan.objective_s / anew.objective_s:12.9f}  {plan.gap:.2%}, {anew.gap:.2%}",
              flush=True)


if __name__ == "__main__":
    main()
