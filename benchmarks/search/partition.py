"""The partition search against trying all partitions, on random rows of blocks and all schedules.

    python -m benchmarks.search.partition            # 1,000 cases, each without and with a memory limit
"""
from __future__ import annotations

import argparse
import sys
import time

import numpy as np

from autoshard.pipeline.shapes.partitions import price_by_play
from autoshard.search.partition import partition, rank_bytes
from tests.support.random_chains import Case, all_cuts, by_trying_all, random_case


def compare(case: Case, limit: float) -> dict[str, float]:
    best, bounds, prices = by_trying_all(case, limit)
    found = partition(case.chain, case.course, price_by_play(case.chain, case.table), limit)
    equal = found.seconds == best or abs(found.seconds - best) <= 1e-9 * best
    ordered = np.sort(bounds)
    return {"equal": equal, "nothing fits": not np.isfinite(best), "bound above a price": bool((bounds > prices * (1 + 1e-12)).any() or found.bound > best * (1 + 1e-12)),
            "gap": found.gap, "needed for a proof": float((ordered < best * (1 - 1e-9)).mean()) if len(ordered) else 0.0,
            "the least bound's price is worse by": float(prices[bounds.argmin()] / best - 1) if len(prices) else 0.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    cases = parser.parse_args().cases
    rows = []
    begin = time.process_time()
    for seed in range(cases):
        case = random_case(seed)
        least = rank_bytes(case.chain, case.course, all_cuts(case.chain.blocks, case.table.stages)).max(1)
        limit = np.random.default_rng(seed).uniform(0.95 * least.min(), np.median(least) * 1.01)
        rows += [compare(case, np.inf), compare(case, limit)]
    print(f"{len(rows)} searches, {time.process_time() - begin:.1f} CPU s")
    for name in rows[0]:
        values = np.array([row[name] for row in rows], dtype=float)
        print(f"{name:38}" + (f"{int(values.sum())} of {len(rows)}" if name in ("equal", "nothing fits", "bound above a price")
                              else f"mean {values.mean():.2%}, at most {values.max():.2%}"))
    if not all(row["equal"] for row in rows) or any(row["bound above a price"] for row in rows):
        sys.exit("the search and the trial of all partitions differ")


if __name__ == "__main__":
    main()
