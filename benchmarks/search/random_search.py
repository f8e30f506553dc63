"""Small random problems, every search backend against brute force.

    python -m benchmarks.search.random_search [--count 10000] [--first 0]

Prints what disagrees (exit code 1), and per backend how many it decided and the CPU seconds it took."""
from __future__ import annotations

import argparse
import time
from collections import Counter

from autoshard.search import Status, solve
from tests.search.random_problems import EXACT, answer, disagreement, random_problem

ROUTES = (*EXACT, "local", "few rows", "by sweeps", "large tables", "by prices")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--routes", nargs="+", default=ROUTES, choices=ROUTES)
    arguments = parser.parse_args()
    decided, seconds, wrong, infeasible = Counter(), Counter(), 0, 0
    for seed in range(arguments.first, arguments.first + arguments.count):
        problem = random_problem(seed)
        reference = solve(problem, backend="brute")
        infeasible += reference.choice is None
        for route in arguments.routes:
            start = time.process_time()
            found = answer(problem, route)
            seconds[route] += time.process_time() - start
            decided[route] += found.status in (Status.OPTIMAL, Status.INFEASIBLE)
            trouble = disagreement(problem, reference, found, exact=route in EXACT)
            if trouble is not None:
                wrong += 1
                print(f"seed {seed}, {route}: {trouble}", flush=True)
    for route in arguments.routes:
        print(f"{route:<10} decided {decided[route]:>6} of {arguments.count}, {seconds[route]:7.1f} CPU s")
    print(f"{infeasible} problems have no feasible choice; {wrong} disagreements")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
