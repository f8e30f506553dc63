"""Strong and weak scaling over 1, 2, 4 ... processes, with the ceiling of independent processes beside it.

    python -m benchmarks.training.scaling --model gpt --size small --processes 1,2,4 --json scaling.json

Runs benchmarks/training/train.py under torchrun once per number of processes and kind of scaling. Strong: the batch stays, more
processes share it. Weak: the batch grows with the processes. The speed-up is against one process with the whole
batch in the same run; efficiency is speed-up / processes. The ceiling is the speed-up of independent processes, which exchange
nothing: with fewer cores than processes it shows what the cores allow. Classic figures to stand beside: 77 % of linear weak
scaling at 8-way model parallelism, 74 % with data parallelism on top (arXiv 1909.08053, up to 512 GPUs).
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.shared.about import about, line, markdown
from benchmarks.training.results import interval

TRAIN = "benchmarks.training.train"


def measured(model: str, size: str, batch: int, processes: int, extra: list[str]) -> dict[str, dict[str, Any]]:
    """Rows of train.py by plan."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m", TRAIN,
                   "--model", model, "--size", size, "--batch", str(batch), "--plans", "one,independent,auto", "--json", str(out), *extra]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed with exit code {done.returncode}\n{done.stdout}")
        return {row["plan"]: row for row in json.loads(out.read_text())["rows"]}


COLUMNS = ("scaling", "processes", "batch", "one process ms", "chosen plan ms", "speed-up", "efficiency", "ceiling", "of ceiling")


def cells(kind: str, run: dict[str, Any]) -> list[str]:
    one, auto, ceiling = (run["rows"][plan] for plan in ("one", "auto", "independent"))
    return [kind, str(run["processes"]), str(run["batch"]), f"{1e3 * one['seconds'][0]:.0f}", f"{1e3 * auto['seconds'][0]:.0f}",
            interval(auto["speed_up"]), f"{auto['speed_up'][0] / run['processes']:.0%}", interval(ceiling["speed_up"]),
            interval(auto["of_ceiling"])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt")
    parser.add_argument("--size", default="small")
    parser.add_argument("--batch", type=int, default=8, help="of one process, and of strong scaling")
    parser.add_argument("--processes", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--cluster", help="profile to plan for")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    extra = ["--rounds", str(options.rounds)] + (["--cluster", options.cluster] if options.cluster else [])
    runs = {}  # one process is the same run for both kinds
    for kind in ("strong", "weak"):
        for n in map(int, options.processes.split(",")):
            batch = options.batch * (n if kind == "weak" else 1)
            if (n, batch) not in runs:
                runs[n, batch] = {"processes": n, "batch": batch, "rows": measured(options.model, options.size, batch, n, extra)}
            runs[n, batch].setdefault("kinds", []).append(kind)
            print(f"{kind}, {n} processes: done", file=sys.stderr)
    facts, found = {"model": options.model, "size": options.size, **about()}, list(runs.values())
    rows = [cells(kind, run) for kind in ("strong", "weak") for run in found if kind in run["kinds"]]
    print(f"{options.model} {options.size}: {line(facts, f'{options.rounds} rounds')}\n\n{markdown(COLUMNS, rows)}")
    many = [str(run["processes"]) for run in found if run["processes"] > (os.cpu_count() or 1)]
    if many:
        print(f"\nThere are {os.cpu_count()} cores: rows of {' and '.join(dict.fromkeys(many))} processes show what sharing them costs.")
    if options.json:
        options.json.write_text(json.dumps({**facts, "runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
