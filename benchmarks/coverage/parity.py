"""Sharded training against one process: model x mesh x plan on real gloo processes, as a table.

    python -m benchmarks.coverage.parity                            # everything: about an hour on 2 cores
    python -m benchmarks.coverage.parity --mesh dp=2 --model gpt    # some of it
    python -m benchmarks.coverage.parity --minutes 10 -o docs/parity.md
"""
from __future__ import annotations

import argparse
import pickle
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from autoshard.base.mesh import parse_mesh
from benchmarks import ROOT
from tests.dist.harness import on_ranks
from tests.dist.parity_cases import MODELS, Case, Result, cases, run_cases

MESHES = ("dp=2", "dp=2,tp=2", "dp=4")


def main() -> int:
    options = arguments()
    out, deadline = options.output, None if options.minutes is None else time.time() + 60 * options.minutes
    results = earlier(out) if options.resume else []
    wanted = list(cases(MODELS, MESHES))
    done = {r.case for r in results}
    for mesh in options.mesh or MESHES:
        for model in options.model or MODELS:
            todo = [c for c in wanted if (c.mesh, c.model) == (mesh, model) and c not in done and chosen(c, options)]
            if not todo or (deadline and time.time() > deadline):
                continue
            with tempfile.TemporaryDirectory() as folder:
                found = on_ranks(parse_mesh(mesh).size, run_cases, todo, folder, options.time_limit, deadline, timeout=1800)
            results += found[0]
            print("\n".join(line(r) for r in found[0]), flush=True)
            if out:
                out.with_suffix(".pickle").write_bytes(pickle.dumps(results))
                out.write_text(page(results, wanted))
    return sum(not r.passed for r in results) > 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Sharded training against one process, as a table.")
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--mesh", action="append", help=f"default: {' '.join(MESHES)}")
    parser.add_argument("--plan", action="append", help="data parallel, fully sharded, ...")
    parser.add_argument("--inputs", choices=("global", "local"))
    parser.add_argument("--dtype", choices=("float64", "float32"))
    parser.add_argument("--minutes", type=float, help="start no case after this long; the page says what was left out")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds of search per plan")
    parser.add_argument("--resume", action="store_true", help="keep what an earlier run with the same -o found")
    parser.add_argument("-o", "--output", type=Path, help="write a Markdown page here")
    return parser.parse_args()


def earlier(out: Path) -> list[Result]:
    """What passed in an earlier run."""
    return [r for r in pickle.loads(out.with_suffix(".pickle").read_bytes()) if r.passed]


def chosen(case: Case, options: argparse.Namespace) -> bool:
    return ((not options.plan or case.plan in options.plan) and options.inputs in (None, case.inputs)
            and options.dtype in (None, case.dtype))


def line(r: Result) -> str:
    c = r.case
    if r.failure:
        last = r.failure.strip().splitlines()[-1][:160]
        return f"| {c.model} | {c.mesh} | {c.plan} | {c.inputs} | {c.dtype} | **failed** | | | {last} |"
    return (f"| {c.model} | {c.mesh} | {c.plan} | {c.inputs} | {c.dtype} | {mark(r.error <= r.allowed)} {r.error:.1e} | "
            f"{mark(r.as_planned)} {r.collectives} | {mark(r.repriced <= 1e-9)} {r.repriced:.0e} | {r.worst} |")


def mark(good: bool) -> str:
    return "ok" if good else "**off**"


def page(results: list[Result], wanted: list[Case]) -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    left = Counter(c.mesh for c in wanted if c not in {r.case for r in results})
    missing = ", ".join(f"{n} cases on {mesh}" for mesh, n in left.items()) or "nothing"
    head = "| model | mesh | plan | inputs | dtype | largest relative error | collectives as planned | re-priced | worst tensor |"
    return "\n".join([
        "# Parity", "",
        f"{time.strftime('%Y-%m-%d %H:%M')} UTC, commit {commit}, `python -m {' '.join([__spec__.name, *sys.argv[1:]])}`.", "",
        f"{sum(r.passed for r in results)} of {len(results)} cases passed. Not run: {missing}.", "",
        "Each case trains a tiny model on gloo processes and the same model on one process from equal weights and batches:",
        "three AdamW steps in float64 (losses, gradients, updated weights and buffers), the loss and gradients of one step in",
        "float32. Error: |difference| / max(norm of the tensor, 1e-6 x norm of all gradients); allowed are 1e-9, for the models",
        "of transformers (which compute losses in float32) 1e-6, in float32 1e-5 or 4 times what the one process is itself off from",
        "float64, if that is more (gradients that are zero in exact arithmetic, batch norm over few values). Collectives: how many were intercepted in one",
        "step, and whether kind, bytes and axis are the planned ones. Re-priced: relative difference of the lowered program's",
        "price to the plan's objective, 1e-9 allowed.", "",
        head, "|" + " --- |" * 9, *map(line, results), ""])


if __name__ == "__main__":
    sys.exit(main())
