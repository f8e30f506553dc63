"""The route of plans: a large problem with a handful of rows (memory, overlap windows), many equal layers.

At given row prices the problem has no rows, reduces well and its message-passing bound is usually tight, so one such
solve gives a bound and an optimal choice of the priced problem. Prices are bisected on the sign of each row's excess.
What gap is left is closed by fixing with reduced costs at the best prices and a MIP with the rows."""
from __future__ import annotations

import math

import numpy as np

from autoshard.search.board import MARGIN, Board
from autoshard.search.clock import Clock, Phase
from autoshard.search.core import Core, build
from autoshard.search.large.dual import Dual
from autoshard.search.large.exact import SMALL_TABLES, shrink, table_entries
from autoshard.search.milp import solve_mip
from autoshard.search.presolve import Infeasible, reduce_core
from autoshard.search.problem import row_loads
from autoshard.search.tie import tie

TRIALS = 12
GAPS = (1e-7, 1e-5, 1e-3)  # assumed gaps of the priced problem, widened while nothing is found
TABLES = 2 * SMALL_TABLES


def search_few_rows(board: Board, core: Core, seed: int) -> None:
    """Tied first, if layers repeat: its choice is an incumbent, its prices a start. Then the problem itself."""
    prices = np.zeros(len(core.limit))
    quotient, lift = tie(board.problem)
    if quotient.n < board.problem.n:
        tied = Board(quotient, Clock(0.4 * board.clock.left, board.clock.work_limit))
        tied_core = build(quotient)[0]
        reduce_core(tied_core, tied.clock.expired)
        prices = search_prices(tied, tied_core, seed, prices, TRIALS)
        if tied.choice is not None:
            board.offer(lift(tied.choice), "layers tied")
        board.stats["tied"] = {"cost": tied.cost, "bound": tied.bound, "seconds": tied.clock.seconds}
    search_prices(board, core, seed, prices, 2 if board.choice is not None else TRIALS)


def search_prices(board: Board, core: Core, seed: int, prices: np.ndarray, trials: int) -> np.ndarray:
    """Bisect the row prices from `prices`, then solve what is left with rows. Returns the prices of the best bound."""
    low, high = np.zeros(len(prices)), core.price.copy()
    best, best_bound = prices, -math.inf
    for trial in range(trials):
        if board.done:
            return best
        bound, choice = _priced(board, core, prices, seed)
        if bound > best_bound:
            best, best_bound = prices, bound
        board.raise_bound(bound, "row prices")
        if choice is None or board.proven:
            break
        board.offer(choice, "row prices")
        excess = _excess(board, core, choice)
        low, high = np.where(excess > 0, np.maximum(low, prices), low), np.where(excess < 0, np.minimum(high, prices), high)
        new = _next_prices(core, prices, low, high, excess, bound)
        if np.array_equal(new, prices):
            break
        prices = new
    if not board.done:
        _close(board, core, best, seed)
    return best


def _excess(board: Board, core: Core, choice: np.ndarray) -> np.ndarray:
    excess = row_loads(board.problem, choice) - board.problem.row_limit
    return np.where(core.price > 0, excess, 0.0)


def _next_prices(core: Core, prices: np.ndarray, low: np.ndarray, high: np.ndarray, excess: np.ndarray, bound: float) -> np.ndarray:
    """Where the excess and the price disagree, move: to the row's own price at first, then halfway."""
    capped = np.isfinite(core.price)
    first = max(abs(bound), 1e-12) / np.maximum(np.abs(core.limit), 1.0)
    up = np.where(np.isfinite(high), np.where((high == core.price) & (low <= 0), high, 0.5 * (low + high)),
                  np.maximum(4.0 * prices, np.where(capped, 0.0, 0.05 * first)))
    down = np.where(low <= 0, np.where(prices > 1e-3 * np.where(capped, core.price, first), 0.5 * high, 0.0), 0.5 * (low + high))
    return np.where(excess > 0, np.minimum(up, core.price), np.where((excess < 0) & (prices > 0), down, prices))


def _priced(board: Board, core: Core, prices: np.ndarray, seed: int) -> tuple[float, np.ndarray | None]:
    """(bound, choice) of the problem with the rows priced; the choice is optimal for these prices, or None in time."""
    free = core.copy()
    free.price_rows(prices)
    reduce_core(free, board.clock.expired)
    if not free.alive:
        return free.constant, free.lift(np.zeros(len(free.cost), dtype=np.int64))
    dual = Dual(free)
    dual.ascend(Phase(board.clock, 0.5), target=None, stall=2)
    bound = dual.reduce(math.inf)[1]
    for gap in GAPS:
        try:
            small = shrink(board, dual, bound + gap * max(abs(bound), 1e-12))
        except Infeasible:
            continue
        if table_entries(small) > TABLES:
            break
        answer = solve_mip(small, min(20.0, board.clock.left), seed=seed)
        if answer.choice is not None:
            return max(bound, min(answer.bound, bound + gap * abs(bound))), small.lift(answer.choice)
    return bound, None


def _close(board: Board, core: Core, prices: np.ndarray, seed: int) -> None:
    """Under the upper bound that is known, fix by reduced costs at `prices` and solve the rest with its rows."""
    dual = Dual(core, prices)
    dual.settle_at_prices(Phase(board.clock, 0.3))
    upper = board.cost if math.isfinite(board.cost) else dual.bound + 0.05 * abs(dual.bound)
    try:
        small = shrink(board, dual, upper)
        if table_entries(small) > 4 * TABLES:
            return
        answer = solve_mip(small, board.clock.left, seed=seed)
    except Infeasible:
        board.raise_bound(upper * (1 - MARGIN) if math.isfinite(upper) else upper, "nothing cheaper")
        return
    if answer.choice is not None:
        board.offer(small.lift(answer.choice), "exact on the reduced core")
    board.raise_bound(min(upper, answer.bound), "exact on the reduced core")
