"""A bound that adds up over parts of a problem: rows at prices that all parts share."""
from __future__ import annotations

import numpy as np

from autoshard.search.board import MARGIN, Board
from autoshard.search.clock import Clock
from autoshard.search.heap import settled_heap
from autoshard.search.problem import Problem
from autoshard.search.reductions import reduce_core, settle_rows
from autoshard.search.reductions.core import build
from autoshard.search.routes.priced import solve_priced
from autoshard.search.routes.prices import search_prices


def priced_bound(problem: Problem, clock: Clock, prices: np.ndarray | None = None, enough: float = 0.0) -> tuple[float, np.ndarray]:
    """(bound, prices): no choice costs less than the bound where every row costs `price x (load - limit)`, whether it is over its limit or not.
    With 0 <= price <= `row_price` that is never above what the row costs, `row_price x max(0, load - limit)`. It is linear in the load, so bounds of
    parts at the same prices add up to a bound of the whole, also where the parts share rows. `prices`: by default those that make about
    the highest bound of this problem. `enough`: the relative gap at which to stop. Raises Infeasible where no choice is possible."""
    core, _ = build(problem)
    board = Board(problem, clock, enough=enough)
    with settled_heap():
        if prices is not None:
            return solve_priced(board, core, prices, 0, enough).bound, prices
        settle_rows(core)
        reduce_core(core, clock.expired)
        best, _, _ = search_prices(board, core, [], 0, gain=max(MARGIN, enough / 2))
    if best is None:
        return 0.0, np.zeros(len(problem.row_limit))
    surely_over = (core.price == 0) & (problem.row_price > 0)  # their price is part of the costs by now
    return best.bound, np.where(surely_over, problem.row_price, best.prices)
