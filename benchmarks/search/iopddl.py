"""Solve contest instances and print them beside the official records.

    python -m benchmarks.search.iopddl FILES... [--time-limit SECONDS]

Each file runs in a process of its own, so peak memory is its own; the time counts reading the file."""
from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

# Best of the contest's teams (8 cores), per instance letter at the end of the file name, with the official time limit.
OFFICIAL = {"A": (6_548_641_531, 60), "G": (217_039, 120), "M": (49_928_460_991, 180), "S": (1_534_613_444, 240)}
CHILD = """
import resource, sys, time
start = time.monotonic()
from autoshard.search.contest.command import solve_command
solve_command(sys.argv[1], float(sys.argv[2]), output=sys.argv[3], as_json=True, start=start)
"""


def run(path: Path, time_limit: float) -> tuple[dict, float]:
    """(the solution file's content, peak memory in GB)."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "solution.json"
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        done = subprocess.run([sys.executable, "-c", CHILD, str(path), str(time_limit), str(output)],
                              stdout=subprocess.DEVNULL, check=False)
        peak = max(before, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
        if not output.exists():
            raise SystemExit(f"{path}: no solution (exit code {done.returncode})")
        return json.loads(output.read_text()), peak / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--time-limit", type=float, help="seconds; default: the contest's limit, or 60")
    arguments = parser.parse_args()
    print(f"{'instance':<28}{'official best':>16}{'ours':>16}{'ratio':>9}{'bound':>16}{'gap %':>9}{'s':>7}{'peak GB*':>9}")
    for path in arguments.files:
        name = path.name.removesuffix(".gz").removesuffix(".json")
        best, limit = OFFICIAL.get(name.rsplit("-", 1)[-1], (None, 60))
        answer, peak = run(path, arguments.time_limit or limit)
        ratio = f"{best / answer['cost']:.5f}" if best else ""
        print(f"{name:<28}{f'{best:,}' if best else '':>16}{answer['cost']:>16,}{ratio:>9}{answer['bound']:>16,}"
              f"{100 * answer['gap']:>9.4f}{answer['seconds']:>7.1f}{peak:>9.2f}", flush=True)
    print("* the largest so far in this run")


if __name__ == "__main__":
    main()
