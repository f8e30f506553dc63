"""The exact route for cores with binding rows: prices and bound, an assumed upper bound, fixing, a small MIP.

A choice at most as dear as the assumed upper bound is optimal with no incumbent needed, because everything dearer was
removed and nothing else. When there is none, the assumption was too low and has become a bound."""
from __future__ import annotations

import math

from autoshard.search.board import Board
from autoshard.search.clock import Phase
from autoshard.search.dual.dual import Dual
from autoshard.search.reductions import Infeasible, reduce_core
from autoshard.search.reductions.core import Core, table_entries
from autoshard.search.routes.milp import solve_mip

FIRST_GAP = 2e-4
WIDEN = 4.0
SMALL_TABLES = 60_000  # entries of all tables left; a MIP of this size takes seconds
ROUNDS = 4


def search_small(board: Board, core: Core, seed: int) -> None:
    """Widen an assumed gap until the optimum is inside, as long as what is left stays small enough for a MIP."""
    dual = Dual(core)
    dual.ascend(Phase(board.clock, 0.2), target=_finite(board.cost))
    board.raise_bound(dual.reduce(math.inf)[1], "message passing")
    gap = FIRST_GAP * max(abs(dual.bound), 1e-300)
    while not board.done:
        upper = min(board.cost, dual.bound + gap)
        if not _try(board, dual, upper, seed):
            return
        gap *= WIDEN


def _try(board: Board, dual: Dual, upper: float, seed: int) -> bool:
    """Solve under the assumption that the optimum is at most `upper`. False when that was out of reach."""
    try:
        core = shrink(board, dual, upper)
        if table_entries(core) > SMALL_TABLES:
            return False
        answer = solve_mip(core, board.clock.left, seed=seed, overdue=board.clock.overdue)
    except Infeasible:
        board.raise_bound(upper, "nothing cheaper")
        return True
    if answer.infeasible:
        board.raise_bound(upper, "nothing cheaper")
        return True
    if answer.choice is not None:
        board.offer(core.lift(answer.choice), "exact on the reduced core")
    board.raise_bound(min(answer.bound, upper), "exact on the reduced core")
    return answer.proven


def shrink(board: Board, dual: Dual, upper: float) -> Core:
    """Fix by reduced cost, reduce, price again, while that still helps."""
    core, prices = dual.reduce(upper)[0], dual.row_prices()
    for _ in range(ROUNDS):
        before = table_entries(core)
        reduce_core(core, board.clock.expired)
        if not core.alive or board.clock.expired() or table_entries(core) > 0.7 * before:
            break
        again = Dual(core, prices)
        again.ascend(Phase(board.clock, 0.1), target=upper, step=0.05, stall=3)
        prices = again.row_prices()
        core, _ = again.reduce(upper)
    reduce_core(core, board.clock.expired)
    return core


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
