"""The exact route: reduce, forget the rows, solve; if that optimum keeps the rows it is the optimum. Else add them."""
from __future__ import annotations

import numpy as np

from autoshard.search.board import Board
from autoshard.search.core import Core, build
from autoshard.search.milp import solve_mip
from autoshard.search.presolve import Infeasible, reduce_core


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
