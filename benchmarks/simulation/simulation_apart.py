"""benchmarks/simulation/simulation.py, one model after another, each in processes of its own; the figures are of all rows together.

    python -m benchmarks.simulation.simulation_apart [--seconds 900] [--models gpt,mlp] [--json out.json]
    python -m benchmarks.simulation.simulation_apart --quick

A process that holds the plans of six models takes longer over the same step than one that holds the plans of one (resnet by a sixth), and nobody trains so.
Every model has its own calibration, before its first step and in its rounds. Its output is in the folder that is said first.
"""
from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.shared.about import about
from benchmarks.simulation.simulated_rows import MODES, Row, figures, saved, show
from benchmarks.simulation.simulation import MODELS

PROCESSES = 2


def rows_of(model: str, folder: Path, more: list[str]) -> list[Row]:
    """Those of one model. Raises SystemExit, with the end of what it wrote, where it fails."""
    found, log = folder / f"{model}.json", folder / f"{model}.log"
    with log.open("w") as out:
        run = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES), "-m", "benchmarks.simulation.simulation",
                              "--models", model, "--json", str(found), *more], stdout=out, stderr=subprocess.STDOUT)
    if run.returncode:
        raise SystemExit(f"{model} failed; the end of {log}:\n" + "\n".join(log.read_text().splitlines()[-20:]))
    return [Row(**{name: value for name, value in r.items() if name != "floor"}) for r in json.loads(found.read_text())["rows"]]


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help=f"some of {','.join(MODELS)}")
    parser.add_argument("--seconds", type=float, default=900.0, help="about how long all of it may take")
    parser.add_argument("--quick", action="store_true", help="three plans of a model, three rounds: whether it works, not how well")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.models = options.models.split(",")
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"no model {min(unknown)!r}; choose from {', '.join(MODELS)}")
    return options


def main() -> None:
    begun, options = time.perf_counter(), options_of()
    folder = Path(tempfile.mkdtemp(prefix="simulation-"))
    print(f"one model after another; what they write is in {folder}", flush=True)
    rows: list[Row] = []
    for n, model in enumerate(options.models):
        share = (options.seconds - (time.perf_counter() - begun)) / (len(options.models) - n)
        rows += (own := rows_of(model, folder, ["--quick"] if options.quick else ["--seconds", f"{share:.0f}"]))
        print(f"{model}: {len(own)} plans, {min(r.rounds for r in own)} rounds; {time.perf_counter() - begun:.0f} s", flush=True)
    show(rows)
    if options.json:
        found: dict[str, Any] = {"about": about(), "rows": saved(rows), **{mode: figures(rows, mode) for mode in MODES}}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
