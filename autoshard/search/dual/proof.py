"""Optimality in whole numbers: nothing costs less than the best choice found, without trusting any solver or rounding.

The problem must have whole costs and loads. Branch and reduce: prices and messages suggest a bound, and the bound is then
computed again in arithmetic that is exact. Messages and everything added to costs are multiples of a power of two, small
enough against 2**53 that every sum of them is exact in float64 (`_fits` checks that); prices times loads are multiplied as
Python integers and rounded down to that grid. What costs more than `upper` on such a bound is removed; a branch ends when
nothing is left, and a choice that survives every removal is one that costs less than was believed to be the optimum."""
from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from autoshard.search.board import Board
from autoshard.search.dual import messages
from autoshard.search.dual.dual import Dual, sum_messages
from autoshard.search.problem import Problem
from autoshard.search.reductions import Infeasible, reduce_core
from autoshard.search.reductions.core import Core, build

FINEST = 20  # the grid is never finer than 2**-20
PRICE_BITS = 40  # of the highest price
ROUNDS = 12  # of sweeps, per core
STEP = 0.1
SECONDS = 10.0


class Unproven(Exception):
    """The time was up, or numbers grew too large for exact sums."""


def confirm(board: Board) -> bool:
    """Whether it is proven in whole numbers that nothing is cheaper than the board's choice. A cheaper choice, should
    there be one, goes to the board and is confirmed in turn. Takes at most `SECONDS` more than the search itself took."""
    clock = board.clock
    end = min(clock.time_limit, 2 * clock.seconds + SECONDS)
    grid = exact_grid(board.problem)
    if grid is None:
        return False
    try:
        core = build(board.problem)[0]
        prover = Prover(grid, lambda: clock.stopped or clock.seconds > end)
        while True:
            cheaper = prover.search(core.copy(), board.cost - 1.0)
            if cheaper is None:
                return True
            before = board.cost
            if not board.offer(cheaper, "found while proving") < before:
                return False
    except Unproven:
        return False


def exact_grid(problem: Problem) -> float | None:
    """A power of two such that sums of all costs are exact in multiples of it; None when the problem is not in whole
    numbers, or they are too large."""
    if not np.array_equal(problem.row_limit, np.rint(problem.row_limit)) or np.abs(problem.row_limit).max(initial=0.0) >= 5e8:
        return None  # `evaluate` lets a load exceed a row by 1e-9 of its limit, which must stay below one
    amounts = [problem.items.amount] + ([] if problem.intervals is None else [problem.intervals.amount])
    if any(not np.array_equal(a, np.rint(a)) or np.abs(a).sum() >= 2.0**52 for a in amounts):
        return None
    most = sum(_largest(c) for c in problem.node_costs) + sum(_largest(e.table) for e in problem.edges)
    bits = 49 - math.ceil(math.log2(max(1.0, most)))
    return None if bits < 0 else 2.0 ** -min(bits, FINEST)


class Prover:
    """Depth-first branch and reduce; `branches` counts the cores looked at."""

    def __init__(self, grid: float, expired: Callable[[], bool]):
        self.grid, self.expired = grid, expired
        self.branches = 0

    def search(self, core: Core, upper: float) -> np.ndarray | None:
        """A choice (of all nodes) that costs at most `upper`, or None: there is none. Raises Unproven."""
        stack: list[tuple[Core, np.ndarray]] = [(core, np.zeros(len(core.limit)))]
        while stack:
            core, prices = stack.pop()
            self.branches += 1
            try:
                core, prices = self._reduce(core, upper, prices)
            except Infeasible:
                continue
            if core.alive:
                v, order = _branch_on(core)
                half = (len(order) + 1) // 2
                for kept in (order[half:], order[:half]):
                    part = core.copy()
                    part.keep(v, np.sort(kept))
                    stack.append((part, prices))
            elif core.constant <= upper and (core.base <= core.limit).all():
                return core.lift(np.zeros(len(core.cost), dtype=np.int64))
        return None

    def _reduce(self, core: Core, upper: float, prices: np.ndarray) -> tuple[Core, np.ndarray]:
        """Presolve and exact fixing in turn, while they help."""
        before = math.inf
        while True:
            if self.expired() or not _fits(core, self.grid):
                raise Unproven
            reduce_core(core)
            size = sum(len(core.cost[v]) for v in core.alive)
            if not size or size > 0.8 * before:
                return core, prices
            dual, before = Dual(core, prices), size
            with suppress(Infeasible):  # said in floating point: the exact bound decides
                dual.ascend(_Rounds(dual, upper), target=upper + 1e-3 * abs(upper) + 1.0, step=STEP, stall=3)
            core, prices = reduce_exactly(dual, upper, self.grid), dual.row_prices()


def reduce_exactly(dual: Dual, upper: float, grid: float) -> Core:
    """The core reparametrised, without the strategies and pairs that cost more than `upper`; see `Dual.reduce`, of which
    this is the exact form. Raises Infeasible when nothing is left, Unproven where sums might round."""
    p, core = dual.packed, dual.core
    dual.settle()
    cost, constant = _priced(dual, grid)
    message = dual.message.copy()
    messages.decouple(p, cost, message, grid)
    incoming = sum_messages(p, message)
    marginal = cost + incoming
    least = np.minimum.reduceat(marginal, p.start[:-1])
    tables, edge_least = dual.slacks(message)
    degree = int(np.diff(p.adj_ptr).max(initial=0)) + 2
    sums = degree * (_largest(cost) + np.abs(message).max(initial=0.0)) + _largest(p.table)
    sums += math.fsum(map(abs, edge_least.values())) + float(np.abs(least).sum()) + abs(constant) + abs(core.constant)
    if not sums < 2.0**52 * grid:  # nor if it is nan
        raise Unproven
    bound = math.fsum([*least.tolist(), *edge_least.values(), constant, core.constant])
    room = upper - bound
    if room < 0.0:
        raise Infeasible(-1)
    alive = marginal - np.repeat(least, np.diff(p.start)) <= room
    out = core.copy()
    dual.write(out, incoming, tables, edge_least, alive, np.zeros_like(marginal), room)  # sums of more terms might round
    return out


def _priced(dual: Dual, grid: float) -> tuple[np.ndarray, float]:
    """(cost + price of usage, -sum of price x slack), each rounded down to the grid from its exact value."""
    p, core = dual.packed, dual.core
    cost = p.cost.copy()
    highest = float(dual.best_prices.max(initial=0.0))
    if highest <= 0.0:
        return cost, 0.0
    shift = PRICE_BITS - math.frexp(highest)[1]  # prices are whole multiples of 2**-shift from here on
    price = [int(math.ldexp(x, shift)) for x in dual.best_prices.tolist()]
    total = np.concatenate([[0], np.cumsum(np.array(price, dtype=object))])
    for v in range(len(dual.nodes)):
        begin, end = p.start[v], p.start[v + 1]
        extra = 0
        for i in range(p.item_ptr[v], p.item_ptr[v + 1]):
            amount = p.amount[p.item_amount[i]:p.item_amount[i] + end - begin].astype(np.int64).astype(object)
            extra = extra + (total[p.item_hi[i]] - total[p.item_lo[i]]) * amount
        if not isinstance(extra, int):
            cost[begin:end] += [_round_down(x, shift, grid) for x in extra]
    slack = [math.floor(core.limit[r]) - int(core.base[r]) for r in dual.rows.tolist()]  # loads are whole
    return cost, _round_down(-sum(x * s for x, s in zip(price, slack, strict=True)), shift, grid)


def _round_down(x: int, shift: int, grid: float) -> float:
    """The largest multiple of `grid` that is at most x * 2**-shift."""
    bits = shift + math.frexp(grid)[1] - 1
    return float(x >> bits if bits >= 0 else x << -bits) * grid


def _branch_on(core: Core) -> tuple[int, np.ndarray]:
    """The node whose choice matters most to costs, and its strategies, cheapest first."""
    v = max(core.alive, key=lambda v: _spread(core.cost[v]) + sum(_spread(t.a) for t in core.adj[v].values()))
    return v, np.argsort(core.cost[v], kind="stable")


def _spread(a: np.ndarray) -> float:
    finite = a[np.isfinite(a)]
    return float(finite.max() - finite.min())


def _fits(core: Core, grid: float) -> bool:
    """Whether every sum that reductions can form is exact: below 2**53 grid steps."""
    most = abs(core.constant) + sum(_largest(core.cost[v]) for v in core.alive)
    most += sum(_largest(t.a) for v in core.alive for t in core.adj[v].values())
    return most < 2.0**50 * grid


def _largest(a: np.ndarray) -> float:
    return float(np.abs(a[np.isfinite(a)]).max(initial=0.0))


class _Rounds:
    """A `Pace`: so many rounds, or until the bound is above what is to be proven."""

    def __init__(self, dual: Dual, upper: float):
        self.dual, self.upper, self.left = dual, upper, ROUNDS

    def tick(self, work: int) -> None:
        self.left -= 1

    def over(self) -> bool:
        return self.left <= 0 or self.dual.bound > self.upper + 0.5
