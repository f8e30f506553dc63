"""The route of plans: a large problem with a handful of rows (memory, overlap windows), many equal layers.

At given row prices the problem has no rows, reduces well and its message-passing bound is usually tight, so one such
solve gives a bound and an optimal choice of the priced problem. Prices follow cutting planes, a few solves.
What gap is left is closed by fixing with reduced costs at the best prices and a MIP with the rows."""
from __future__ import annotations

import math

import numpy as np
from ortools.math_opt.python import mathopt

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
COMBINE_SECONDS = 10.0
GAPS = (1e-7, 1e-5, 1e-3, 1e-2, 4e-2)  # assumed gaps of the priced problem, widened while nothing is found
TABLES = 2 * SMALL_TABLES
SETTLE_WORK = 4e9  # table entries read before reduced costs fix: a few seconds, and a limit that repeats
CLOSABLE = 1e-3  # wider gaps of untied layers leave more than a MIP can take: fixing is not even tried


def search_few_rows(board: Board, core: Core, seed: int) -> None:
    """Tied first, if layers repeat: its choice is an incumbent, its prices a start. Then the problem itself."""
    prices, pool = np.zeros(len(core.limit)), []
    quotient, lift = tie(board.problem)
    if quotient.n < board.problem.n:
        tied = Board(quotient, Clock(0.4 * board.clock.left, board.clock.work_limit))
        try:
            tied_core = build(quotient)[0]
            reduce_core(tied_core, tied.clock.expired)
            prices, found = search_prices(tied, tied_core, seed, prices, TRIALS)
            pool = [lift(choice) for choice in found]
        except Infeasible:
            board.report("no choice treats the layers alike")  # says nothing about untied ones
        if tied.choice is not None:
            board.offer(lift(tied.choice), "layers tied")
        board.tied_proven = tied.proven and board.cost >= tied.cost - MARGIN * abs(tied.cost)
        board.stats["tied"] = {"cost": tied.cost, "bound": tied.bound, "seconds": tied.clock.seconds}
    _, found = search_prices(board, core, seed, prices, 2 if pool else TRIALS, CLOSABLE if pool else math.inf)
    if not board.done:
        _combine(board, [*pool, *found], seed)


def search_prices(board: Board, core: Core, seed: int, prices: np.ndarray, trials: int,
                  closable: float = math.inf) -> tuple[np.ndarray, list]:
    """Raise the bound over the row prices from `prices`, then solve what is left with rows, if the gap is at most `closable`.

    Returns the best prices and the choices that were optimal at the prices tried."""
    best, best_bound, cuts, found = prices, -math.inf, [], []
    for _ in range(trials):
        if board.done:
            return best, found
        bound, choice = _priced(board, core, prices, seed)
        if bound > best_bound:
            best, best_bound = prices, bound
        board.raise_bound(bound, "row prices")
        if choice is None:  # the bound is loose out there: come back halfway to prices that worked
            if not cuts:
                break
            prices = 0.5 * (prices + cuts[-1][0])
            continue
        board.offer(choice, "row prices")
        found.append(choice)
        cuts.append((prices, bound, _excess(board, core, choice)))
        prices, promised = _next_prices(core, cuts)
        if promised <= best_bound + MARGIN * abs(best_bound):
            break
    if not board.done:
        _combine(board, found, seed)
        if board.gap <= closable:
            _close(board, core, best, seed)
    return best, found


def _combine(board: Board, pool: list[np.ndarray], seed: int) -> None:
    """The best mixture of known choices: every node may do what some choice in the pool does. Layers that differ only in
    which known choice they follow are how an optimum balances on a row."""
    if len(pool) < 2:
        return
    core = build(board.problem)[0]
    projected = np.stack([core.project(choice) for choice in pool])
    try:
        for v in core.alive:
            allowed = np.unique(projected[:, v])
            allowed = allowed[allowed >= 0]
            if len(allowed) and len(allowed) < len(core.cost[v]):
                core.keep(v, allowed)
        reduce_core(core, board.clock.expired)
        if table_entries(core) <= TABLES:
            answer = solve_mip(core, min(COMBINE_SECONDS, board.clock.left), seed=seed)
            if answer.choice is not None:
                board.offer(core.lift(answer.choice), "mixture of known choices")
    except Infeasible:
        return


def _excess(board: Board, core: Core, choice: np.ndarray) -> np.ndarray:
    excess = row_loads(board.problem, choice) - board.problem.row_limit
    return np.where(core.price > 0, excess, 0.0)


def _next_prices(core: Core, cuts: list[tuple[np.ndarray, float, np.ndarray]]) -> tuple[np.ndarray, float]:
    """Kelley's cutting planes: every priced solve is a plane over the prices that the bound stays below, so the highest
    point under all planes is the next to try, and its height what is still possible."""
    model = mathopt.Model()
    caps = np.where(np.isfinite(core.price), core.price, _cap(core, cuts))
    height = model.add_variable(lb=-math.inf, ub=math.inf)
    share = [model.add_variable(lb=0.0, ub=1.0) for _ in caps]  # of each cap
    steepest = max(float(np.abs(slope * caps).max(initial=0.0)) for _, _, slope in cuts)
    unit = abs(cuts[0][1]) or steepest or 1.0  # solver tolerances are absolute: count in parts of the first bound
    for at, bound, slope in cuts:
        terms = [float(g * cap / unit) * x for g, cap, x in zip(slope, caps, share, strict=True) if g and cap]
        model.add_linear_constraint(height <= float((bound - np.dot(slope, at)) / unit) + mathopt.fast_sum(terms))
    model.maximize(height)
    result = mathopt.solve(model, mathopt.SolverType.GLOP)
    if not result.has_primal_feasible_solution():
        return cuts[-1][0], -math.inf
    prices = caps * np.clip([result.variable_values(x) for x in share], 0.0, 1.0)
    return prices, float(result.objective_value()) * unit


def _cap(core: Core, cuts: list) -> np.ndarray:
    """A hard row has no largest price; allow what prices the whole limit at the bound, and more while it helps."""
    highest = np.max([at for at, _, _ in cuts], axis=0)
    reach = np.max([np.abs(slope) for _, _, slope in cuts], axis=0)
    size = np.where(core.limit != 0.0, np.abs(core.limit), reach)
    return np.maximum(abs(cuts[0][1]) / np.maximum(size, 1e-30), 4.0 * highest)


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
    dual.settle_at_prices(Phase(board.clock, 0.3), SETTLE_WORK)
    upper = board.cost if math.isfinite(board.cost) else dual.bound + 0.05 * abs(dual.bound)
    try:
        small = shrink(board, dual, upper)
        if table_entries(small) > TABLES:
            return
        answer = solve_mip(small, board.clock.left, seed=seed)
    except Infeasible:
        board.raise_bound(upper * (1 - MARGIN) if math.isfinite(upper) else upper, "nothing cheaper")
        return
    if answer.choice is not None:
        board.offer(small.lift(answer.choice), "exact on the reduced core")
    board.raise_bound(min(upper, answer.bound), "exact on the reduced core")
