"""A problem of middle size at a few prices of its rows, each time as a problem without rows (`min_sum.py`).

Cutting planes say which prices are asked next. What is found at one price or another, and the best mixture of all that, is often within a percent of
the bound after some seconds. Where this does not close the problem, other routes go on from there."""
from __future__ import annotations

import numpy as np

from autoshard.search.board import Board
from autoshard.search.problem import Problem
from autoshard.search.reductions.core import Core, build
from autoshard.search.routes.min_sum import minimise
from autoshard.search.routes.mixture import mix
from autoshard.search.routes.prices import Plane, next_prices, plane

FIRST = 0.3  # of what excess costs, the first price
ANSWERS, SHARE = 8, 0.2  # prices that are asked; share of the time left for one, a net
WORTH = 2e-3  # of the bound: what other prices must promise


def search_at_prices(board: Board, seed: int) -> None:
    """Raise the bound of `board` and make its choice cheaper. Hard rows have no price here."""
    core = build(board.problem)[0]
    soft = np.isfinite(core.price) & (core.price > 0)
    if not soft.any():
        return
    prices = np.where(soft, FIRST * core.price, 0.0)
    planes: list[Plane] = []
    found: list[np.ndarray] = []
    while not board.done and len(found) < ANSWERS and not any(np.allclose(prices, at, rtol=1e-6, atol=0.0) for at, *_ in planes):
        choice = _answer(board, prices, found, core)
        if choice is None:
            break
        found.append(choice)
        planes.append(plane(board, core, prices, choice))
        highest, promised = next_prices(core, planes)
        prices = np.where(soft, highest, 0.0)
        if promised <= board.bound + WORTH * abs(board.bound):
            break
    if len(found) > 1 and not board.done:
        mix(board, found, seed)
    board.near = [*board.near, *found]


def _answer(board: Board, prices: np.ndarray, found: list[np.ndarray], like: Core) -> np.ndarray | None:
    """The best choice found at these prices; the bound there is one of the problem."""
    known = [*found, *([board.choice] if board.choice is not None else [])]
    answer = minimise(_without_rows(board.problem, prices), known, board.clock.part(SHARE), like)
    if answer.choice is not None:
        board.raise_bound(answer.bound - float(np.dot(prices, board.problem.row_limit)), "row prices")
        board.offer(answer.choice, "row prices")
    return answer.choice


def _without_rows(problem: Problem, prices: np.ndarray) -> Problem:
    """What is loaded is paid for at these prices, from the first unit on."""
    items, costs = problem.items, list(problem.node_costs)
    paid = np.flatnonzero(prices[items.row] * items.amount)
    paid = paid[np.argsort(items.node[paid], kind="stable")]
    for at in np.split(paid, np.flatnonzero(np.diff(items.node[paid])) + 1):
        if len(at):
            v = int(items.node[at[0]])
            costs[v] = costs[v] + np.bincount(items.strategy[at], items.amount[at] * prices[items.row[at]], len(costs[v]))
    return Problem(tuple(costs), problem.edges)
