"""Training at sizes that divide nowhere against one process: real gloo processes, one launch per number of ranks, as a table.

    python -m benchmarks.coverage.unfriendly                  # all cases: minutes
    python -m benchmarks.coverage.unfriendly llama tp=4       # those whose title has all of these words
    python -m benchmarks.coverage.unfriendly --backend inductor

Each case: three AdamW steps in float64 (losses, gradients, weights), a checkpoint into another mesh, and one step more there.
With inductor models of transformers compute in float64 what they compute in float32 else, so that 1e-9 can be asked of them.
"""
from __future__ import annotations

import argparse
import sys
import tempfile

from tests.dist.harness import on_ranks
from tests.dist.unfriendly_cases import CASES, run_cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--backend", default="", help="eager or inductor, for all cases (default: what a case says)")
    given = parser.parse_args()
    wanted = [i for i, case in enumerate(CASES) if all(word in case.title for word in given.words)]
    print("| case | checkpoint into | collectives | tolerance | | seconds |\n" + "| --- " * 6 + "|", flush=True)
    failures = []
    for world in sorted({CASES[i].world for i in wanted}):
        with tempfile.TemporaryDirectory() as folder:
            results = on_ranks(world, run_cases, [i for i in wanted if CASES[i].world == world], folder, given.backend, timeout=1800)
        failures += [f"{o.case.title}, rank {rank}:\n{o.failure}" for rank, found in enumerate(results) for o in found if o.failure]
    print(*failures, sep="\n")
    return len(failures) > 0


if __name__ == "__main__":
    sys.exit(main())
