"""The exact route: reduce, forget the rows, solve; if that optimum keeps the rows it is the optimum. Else add them."""
from __future__ import annotations

import numpy as np

from autoshard.search.board import Board
from autoshard.search.core import Core, build
from autoshard.search.milp import solve_mip
from autoshard.search.presolve import Infeasible, reduce_core

SMALL_FREE = 100_000  # table entries; above, even the problem without rows is not left to a MIP


def search_auto(board: Board, seed: int, threads: int) -> None:
    """Rows forgotten first; then the exact route by prices, when the core is small; then the large route."""
    try:
        core, _ = build(board.problem)
        reduce_core(core, board.clock.expired)
        board.stats["core"] = _size(core)
        if not _without_rows(board, core, seed) and not board.done:
            from autoshard.search.large.exact import search_small  # loads the compiler: not for problems that never get here

            search_small(board, core, seed)
    except Infeasible:
        board.infeasible = True


def _without_rows(board: Board, core: Core, seed: int) -> bool:
    """Solve the relaxation without rows. True when that settled everything."""
    free = core.copy()
    free.price_rows(np.zeros(len(core.limit)))
    reduce_core(free, board.clock.expired)
    if _entries(free) > SMALL_FREE:
        return False
    _finish(board, free, "milp", seed, "without rows")
    return board.done


def _entries(core: Core) -> int:
    return sum(t.a.size for v in core.alive for t in core.adj[v].values()) // 2


def _size(core: Core) -> dict:
    nodes = core.alive
    return {"nodes": len(nodes), "edges": sum(len(core.adj[v]) for v in nodes) // 2, "entries": _entries(core)}


def search_mip(board: Board, *, solver: str = "milp", seed: int = 0) -> None:
    """Presolve, then one MIP without rows, then one with rows added lazily."""
    try:
        core, _ = build(board.problem)
        reduce_core(core, board.clock.expired)
        if any(core.items[v] for v in core.alive):
            free = core.copy()
            free.price_rows(np.zeros(len(core.limit)))
            reduce_core(free, board.clock.expired)
            _finish(board, free, solver, seed, "without rows")
        if not board.done:
            _finish(board, core, solver, seed, "with rows")
    except Infeasible:
        board.infeasible = True


def _finish(board: Board, core: Core, solver: str, seed: int, message: str) -> None:
    answer = solve_mip(core, board.clock.left, solver=solver, seed=seed)
    if answer.infeasible:
        board.infeasible = True
        return
    if answer.choice is not None:
        board.offer(core.lift(answer.choice), message)
    board.raise_bound(answer.bound, message)
