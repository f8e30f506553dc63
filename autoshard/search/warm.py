"""Compile the loops of the search and cache them on disk, so that no plan waits for a compiler.

    python -m autoshard.search.warm
"""
from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from autoshard.search.board import Board
from autoshard.search.clock import Clock
from autoshard.search.problem import Edge, Items, Problem
from autoshard.search.reductions.core import Core, build
from autoshard.search.routes.anneal import search_large
from autoshard.search.routes.plans import search_few_rows

NODES, STRATEGIES = 8, 3


def warm() -> float:
    """Run both compiled routes on a problem too dense for presolve; returns the seconds it took."""
    start = time.monotonic()
    problem = dense_problem()
    routes: tuple[Callable[[Board, Core], None], ...] = (
        lambda board, core: search_few_rows(board, core, 0), lambda board, core: search_large(board, core, 0, 1))
    for route in routes:
        board = Board(problem, Clock(60.0, work_limit=2000))
        route(board, build(problem)[0])
    return time.monotonic() - start


def dense_problem() -> Problem:
    """Every two nodes share an edge, and one hard and one priced row bind. The first choice of every node fits."""
    rng = np.random.default_rng(0)
    costs = tuple(rng.random(STRATEGIES) for _ in range(NODES))
    every = np.arange(STRATEGIES)
    edges = tuple(Edge(u, v, rng.random((STRATEGIES, STRATEGIES)), every, every) for v in range(NODES) for u in range(v))
    node, strategy, row = (x.ravel() for x in np.meshgrid(np.arange(NODES), every, np.arange(2), indexing="ij"))
    amount = strategy + 0.25 * rng.random(len(strategy))
    return Problem(costs, edges, np.full(2, 0.75 * NODES), np.array([np.inf, 0.3]), Items(node, strategy, row, amount))


if __name__ == "__main__":
    print(f"the search loops are compiled and cached ({warm():.1f} s)")
