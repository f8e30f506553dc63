"""Training in pipeline stages against one process: model x mesh x micro-batches x schedule on real gloo processes, as a table.

    python -m benchmarks.pipeline.pipeline_parity                                   # everything
    python -m benchmarks.pipeline.pipeline_parity --mesh pp=2 --model gpt           # some of it
    python -m benchmarks.pipeline.pipeline_parity --few 2                           # two cases of every model on every mesh, of schedules by turns
    python -m benchmarks.pipeline.pipeline_parity --minutes 10 -o docs/pipeline-parity.md
"""
from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import ROOT
from tests.dist.harness import on_ranks
from tests.dist.pipeline_cases import MODELS, Case, Result, read_journal, run_cases, world_of

TWO, FOUR = "pp=2", ("pp=2,dp=2", "pp=2,tp=2", "pp=4")


def cases() -> Iterator[Case]:
    """On two processes M from 1 to 8, multiples of the stages and not; on four the meshes; interleaved and V placements of four stages. The cuts
    are even, but of one case per model, where they are searched."""
    for model in MODELS:
        for m in (1, 2, 3, 4, 5, 8):
            yield Case(model, TWO, m, cuts=None if m == 2 else ())
        yield from (Case(model, TWO, m, schedule) for m, schedule in ((1, "gpipe"), (4, "gpipe"), (3, "zb1p"), (4, "zb1p"), (4, "zb2p")))
        yield from (Case(model, TWO, m, "interleaved", (), 2) for m in (2, 3, 4))
        yield from (Case(model, TWO, m, "zbv", (), 2) for m in (3, 4))
        for mesh in FOUR:
            yield from (Case(model, mesh, m) for m in (2, 3))
            yield Case(model, mesh, 4, "zb1p")


def few(wanted: list[Case], count: int) -> list[Case]:
    """So many of every model and mesh, each pair beginning at another place of its list: together they have all schedules and numbers of
    micro-batches."""
    pairs: dict[tuple[str, str], list[Case]] = {}
    for case in wanted:
        pairs.setdefault((case.mesh, case.model), []).append(case)
    out: list[Case] = []
    for n, found in enumerate(pairs.values()):
        step = max(1, len(found) // count)
        out += [found[(n + k * step) % len(found)] for k in range(min(count, len(found)))]
    return out


def main() -> int:
    options = arguments()
    wanted = [c for c in cases() if (not options.model or c.model in options.model) and (not options.mesh or c.mesh in options.mesh)
              and (not options.schedule or c.schedule in options.schedule)]
    wanted = few(wanted, options.few) if options.few else wanted
    wanted = wanted[options.skip:][:options.count]
    deadline = None if options.minutes is None else time.time() + 60 * options.minutes
    results: list[Result] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for found in pool.map(lambda part: launched(part, deadline), launches(wanted, options.jobs)):
            results += found
            if options.output:
                options.output.write_text(page(results, wanted))
    results.sort(key=lambda r: wanted.index(r.case))
    print(f"{sum(r.passed for r in results)} of {len(results)} passed; {len(wanted) - len(results)} not run")
    return sum(not r.passed for r in results) > 0


def launches(wanted: list[Case], jobs: int) -> list[list[Case]]:
    """Cases by number of processes, in as many launches each as run at a time: starting processes takes longer than a case."""
    parts: list[list[Case]] = []
    for world in sorted({world_of(c) for c in wanted}):
        mine = [c for c in wanted if world_of(c) == world]
        parts += [mine[at::jobs] for at in range(jobs) if mine[at::jobs]]
    return parts


def launched(part: list[Case], deadline: float | None) -> list[Result]:
    """What came of these cases; where a process ends, those before, and the one at which it ended as failed."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder, "results")
        journal.touch()
        try:
            found = on_ranks(world_of(part[0]), run_cases, part, deadline, str(journal), timeout=3600)[0]
        except AssertionError as e:
            found = read_journal(str(journal))
            if len(found) < len(part):
                found = [*found, Result(part[len(found)], failure=str(e))]
    print("\n".join(map(line, found)), flush=True)
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Training in pipeline stages against one process, as a table.")
    parser.add_argument("--model", action="append", choices=tuple(MODELS))
    parser.add_argument("--mesh", action="append", choices=(TWO, *FOUR))
    parser.add_argument("--schedule", action="append")
    parser.add_argument("--few", type=int, help="so many cases of every model on every mesh")
    parser.add_argument("--jobs", type=int, default=2, help="launches at a time")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many of the cases: for running them in parts")
    parser.add_argument("--count", type=int, help="run at most so many of them")
    parser.add_argument("--minutes", type=float, help="start no case after this long; the page says what was left out")
    parser.add_argument("-o", "--output", type=Path, help="write a Markdown page here")
    return parser.parse_args()


def line(r: Result) -> str:
    c = r.case
    if r.failure:
        return f"| {c.model} | {c.mesh} | {c.microbatches} | {c.schedule} | **failed** | | {r.failure.strip().splitlines()[-1][:160]} |"
    good = "ok" if r.passed else "**off**"
    return f"| {c.model} | {c.mesh} | {c.microbatches} | {c.schedule} | {good} {r.error:.1e} | {'ok' if r.as_planned else '**off**'} {r.messages} | {r.worst} |"


def page(results: list[Result], wanted: list[Case]) -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    left = Counter(c.mesh for c in wanted if c not in {r.case for r in results})
    missing = ", ".join(f"{n} cases on {mesh}" for mesh, n in left.items()) or "nothing"
    return "\n".join([
        "# Pipeline parity", "",
        f"{time.strftime('%Y-%m-%d %H:%M')} UTC, commit {commit}, `python -m {' '.join([__spec__.name, *sys.argv[1:]])}`.", "",
        f"{sum(r.passed for r in results)} of {len(results)} cases passed. Not run: {missing}.", "",
        "Each case trains a tiny model in stages on gloo processes, and the same model on one process, from equal weights and batches: three AdamW",
        "steps in float64, with losses, gradients and weights compared. Error: |difference| / max(norm of the tensor, 1e-6 x norm of all gradients);",
        "1e-9 is allowed. Messages: those that the rank with the largest error sent in one step, and whether they are the plan's transfers, with",
        "their bytes, for every micro-batch in order.", "",
        "| model | mesh | micro-batches | schedule | largest relative error | messages as planned | worst tensor |", "|" + " --- |" * 7,
        *map(line, results), ""])


if __name__ == "__main__":
    sys.exit(main())
