"""The exact route: reduce, forget the rows, solve; if that optimum keeps the rows it is the optimum. Else add them."""
from __future__ import annotations

import numpy as np

from autoshard.search.board import Board
from autoshard.search.reductions import Infeasible, reduce_core
from autoshard.search.reductions.core import Core, build, table_entries
from autoshard.search.routes.as_given import is_middling, is_small, search_as_given
from autoshard.search.routes.milp import solve_mip
from autoshard.search.tie import tied_core

SMALL_FREE = 100_000  # table entries; above, even the problem without rows is not left to a MIP

LARGEST_FREE = 600_000  # of the core with rows; above, forgetting them is not even tried
SURELY_LARGE = 5_000_000  # of equal layers; above, what is left when they are reduced is no small MIP either
SMALL_MIP = 5_000  # table entries up to which the MIP takes the rows too, with no prices first: above, its bound is loose where rows bind


def search_auto(board: Board, seed: int, threads: int) -> None:
    """As it is given, then at a few prices, where that is likely to do; else, and where it did not, reduced."""
    if not (np.isinf(board.problem.row_price) & board.problem.fillable).any():
        if is_small(board.problem):
            search_as_given(board)
        if not board.done and is_middling(board.problem):
            from autoshard.search.routes.at_prices import search_at_prices  # loads the compiled sweeps

            search_at_prices(board, seed)
    if not board.done:
        search_reduced(board, seed, threads)


def search_reduced(board: Board, seed: int, threads: int) -> None:
    """Rows forgotten first; then the exact route by prices, when the core is small; then the large route."""
    try:
        core, _ = build(board.problem)
        if board.near and board.problem.intervals is None and table_entries(core) > SURELY_LARGE:
            from autoshard.search.routes.plans import solve_at_ends  # loads the compiled sweeps

            if solve_at_ends(board, core, seed):
                return
        layers = tied_core(board.problem, core) if board.problem.intervals is None else None
        if layers is None or table_entries(core) <= SURELY_LARGE:
            reduce_core(core, board.clock.expired)
            board.stats["core"] = _size(core)
        if board.problem.intervals is None and table_entries(core) > SMALL_MIP:
            from autoshard.search.routes.plans import search_few_rows  # loads the compiled sweeps

            search_few_rows(board, core, seed, layers)
            return
        if not _without_rows(board, core, seed) and not board.done:
            _with_rows(board, core, seed, threads)
    except Infeasible:
        board.infeasible = True


def search_local(board: Board, seed: int, threads: int) -> None:
    """The large route alone, whatever the size."""
    from autoshard.search.routes.anneal import search_large  # loads the compiled loops

    try:
        core, _ = build(board.problem)
        reduce_core(core, board.clock.expired)
        board.stats["core"] = _size(core)
        if core.alive:
            search_large(board, core, seed, threads)
        else:
            _finish(board, core, "milp", seed, "presolve")
    except Infeasible:
        board.infeasible = True


def _with_rows(board: Board, core: Core, seed: int, threads: int) -> None:
    if table_entries(core) <= SMALL_MIP:
        _finish(board, core, "milp", seed, "with rows")
        return
    from autoshard.search.routes.anneal import search_large  # loads the compiler: small problems never get here
    from autoshard.search.routes.small import search_small

    if table_entries(core) <= SMALL_FREE:
        search_small(board, core, seed)
    if not board.done:
        search_large(board, core, seed, threads)


def _without_rows(board: Board, core: Core, seed: int) -> bool:
    """Solve the relaxation without rows. True when that settled everything."""
    if table_entries(core) > LARGEST_FREE:
        return False
    free = core.copy()
    free.price_rows(np.zeros(len(core.limit)))
    reduce_core(free, board.clock.expired)
    if table_entries(free) > SMALL_FREE:
        return False
    _finish(board, free, "milp", seed, "without rows")
    return board.done


def _size(core: Core) -> dict[str, int]:
    nodes = core.alive
    return {"nodes": len(nodes), "edges": sum(len(core.adj[v]) for v in nodes) // 2, "entries": table_entries(core)}


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
    answer = solve_mip(core, board.clock.left, solver=solver, seed=seed, overdue=board.clock.overdue)
    if answer.infeasible:
        board.infeasible = True
        return
    if answer.choice is not None:
        board.offer(core.lift(answer.choice), message)
    board.raise_bound(answer.bound, message)
