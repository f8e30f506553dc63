"""The route of plans: a large problem with a handful of rows (memory, overlap windows), many equal layers.

At given row prices the problem has no rows and is solved exactly (`priced.py`); prices follow cutting planes, a few
solves. At the best prices the bound is close, because many equal layers can balance a row between them. Then the
strategies that a choice within a small assumed gap may take are few: a MIP with the rows finds the best of them, and
if that is within the gap it is the optimum. Equal layers are first tied: the same on a problem of three layers."""
from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from ortools.math_opt.python import mathopt

from autoshard.search.board import MARGIN, Board
from autoshard.search.clock import Clock
from autoshard.search.mip import guarded
from autoshard.search.problem import row_loads
from autoshard.search.reductions import Infeasible, reduce_core, settle_rows
from autoshard.search.reductions.core import GONE, Core, stored_entries, table_entries
from autoshard.search.routes.mixture import mix
from autoshard.search.routes.priced import (
    LARGEST_PAIR,
    MIP_NODES,
    STORED,
    TABLES,
    Priced,
    choice_value,
    solve_left,
    solve_priced,
    tighten,
)
from autoshard.search.tie import Tied

TRIALS = 16
ROOMS = (3e-5, 3e-4, 3e-3, 3e-2)  # assumed gaps, widened while nothing is found
LIKELY = 3e-4  # the widest of them before the best tied choice is known
NEARBY = 1e-3  # the same of the least cost known: then the best tied choice is not needed, and a MIP may have more entries
COPIES = 8  # times more, of layers that look the same: no more may be distinct
UNLIKELY = 0.3  # of what a bound lacks at its own prices: the optimum is hardly nearer to it
TIED_SHARE = 0.6  # of the time: what is left must do for a bound of the untied problem
FIRST, LOOSE = 1e-3, 0.02  # relative gaps at which to leave the first prices; others, as part of what new prices promise
TIED_NODES = 200  # of a MIP's tree: what is best among tied choices helps, but proves nothing
ROUGH = 1e-3  # relative gap within which the tied problem is not solved closer at prices that are not the best
SAME, HALVINGS = 1e-6, 4  # relative difference of prices that are the same; steps from prices that were asked back to the best
ROUGH_LARGE = 2e-2  # the same where tables are too large to keep, and larger pairs cost most of what an answer does
NEAR = 4  # choices that a problem solved at once leaves for the next one
ENOUGH = 0.8  # of the table entries left: another round is not worth it

Plane = tuple[np.ndarray, float, np.ndarray]
"""(prices, cost of some choice at these prices, its loads above the limits): the bound at other prices is at most
cost + excess x change of prices."""


@dataclass(frozen=True, eq=False)
class Quotient:
    """The problem with its layers tied, after the best prices of its rows were looked for: `best` is their answer. Costs and
    loads on `board` count per copy, see `tie.py`."""

    tied: Tied
    board: Board
    core: Core
    best: Priced | None

    def solved(self) -> np.ndarray | None:
        """The choice found, for the whole problem, where `best` solves the tied one; else None."""
        if self.best is None or not self.best.exact or self.board.choice is None:
            return None
        return self.tied.lift(self.board.choice)


def search_few_rows(board: Board, core: Core, seed: int, layers: tuple[Tied, Core] | None = None) -> None:
    """`layers`: the problem with its layers tied (`tied_core`), which goes first: its choices are starts, its planes a start.
    Then the problem itself. Where the tied one is solved at its best prices, layers only have to share a row: then the problem
    itself is likely to be proven without the best tied choice, and at one price. A core of which one price is asked, or a few of
    one that is small, need not be reduced before: without rows it reduces further."""
    guarded.start()
    settle_rows(core)
    large = stored_entries(core) > STORED  # and what reducing finds out about it, for both problems, is forgotten
    if large:
        reduce_core(core, board.clock.expired)
    quotient, planes, pool = _search_tied(board, core, layers, seed)
    tied_best = quotient.best if quotient is not None else None
    if quotient is not None and (choice := quotient.solved()) is not None:
        likely, reduced = True, not (quotient.core.price == 0)[core.price > 0].any()
        board.offer(choice, "layers tied", tied=True)
    else:
        likely, reduced = False, False
        _close_tied(board, quotient, seed)
    if not large and not reduced:
        reduce_core(core, board.clock.expired)
    best, _, found = search_prices(board, core, planes, seed, tied_best)
    if likely:
        close(board, core, best, seed, widest=LIKELY)
        if not board.done:
            mix(board, [*pool, *found], seed)
            if best is not None and board.cost - best.bound <= NEARBY * abs(best.bound):
                close(board, core, best, seed)
        if not board.done:
            _close_tied(board, quotient, seed)
    close(board, core, best, seed)
    if not board.done and not likely:
        mix(board, [*pool, *found], seed)
    board.near = [*pool, *found]


def solve_at_ends(board: Board, core: Core, seed: int) -> bool:
    """Whether the problem is solved at one price, guessed from choices near an optimum of a similar problem, `board.near`. It is looked at where that
    price is at an end in every row, none or all that excess costs: then no two layers have to share a row, and to tie them first would only
    find the price again."""
    settle_rows(core)
    if stored_entries(core) > STORED:
        return False
    prices, _ = _next_prices(core, _planes(board, core))
    most = prices >= (1 - SAME) * core.price
    if ((prices > SAME * np.where(np.isfinite(core.price), core.price, 0.0)) & ~most).any():
        return False
    priced = solve_priced(board, core, np.where(most, core.price, 0.0), seed)
    board.raise_bound(priced.bound, "row prices")
    if priced.choice is not None:
        board.offer(priced.choice, "row prices")
        board.near = [*board.near[1 - NEAR:], priced.choice]
    return board.done


def _search_tied(board: Board, core: Core, layers: tuple[Tied, Core] | None,
                 seed: int) -> tuple[Quotient | None, list[Plane], list[np.ndarray]]:
    """(None where no layers can be tied, planes, choices found) of the problem with its layers tied. Planes and choices are those
    of the whole problem."""
    if layers is None:
        _spare(core)
        return None, _planes(board, core), []
    tied, quotient = layers
    own = Board(tied.problem, _share(board), enough=board.enough)
    if board.choice is not None:
        own.offer(board.choice[tied.first])  # what its first layer does, all may
    try:
        settle_rows(quotient)
        if stored_entries(quotient) > STORED:
            reduce_core(quotient, own.clock.expired)
        rough = ROUGH_LARGE if stored_entries(quotient) > STORED else ROUGH
        _spare(core, quotient)
        known = _scaled(_planes(board, quotient), 1 / tied.copies)
        best, planes, found = search_prices(own, quotient, known, seed, rough=rough)
    except Infeasible:
        board.report("no choice treats the layers alike")  # says nothing about untied ones
        return None, _planes(board, core), []
    board.clock.cut |= own.clock.cut or own.clock.expired()
    return Quotient(tied, own, quotient, best), _scaled(planes, tied.copies), [tied.lift(choice) for choice in found]


def _close_tied(board: Board, quotient: Quotient | None, seed: int) -> None:
    """The best choice that treats the layers alike, in a share of the time that is left."""
    if quotient is None:
        return
    own, copies = quotient.board, quotient.tied.copies
    own.clock = _share(board)
    close(own, quotient.core, quotient.best, seed, TIED_NODES)
    board.clock.cut |= own.clock.cut or own.clock.expired()
    if own.choice is not None:
        board.offer(quotient.tied.lift(own.choice), "layers tied", tied=True)
    board.tied_proven = own.proven and board.cost >= copies * own.cost - MARGIN * abs(board.cost)
    board.stats["tied"] = {"cost": copies * own.cost, "bound": copies * own.bound, "seconds": own.clock.seconds}


def _share(board: Board) -> Clock:
    return board.clock.part(TIED_SHARE, board.clock.work_limit)


def _scaled(planes: list[Plane], factor: float) -> list[Plane]:
    """Planes of a problem whose costs and rows count `factor` times as much."""
    return [(at, factor * value, factor * excess) for at, value, excess in planes]


def _spare(core: Core, *others: Core) -> None:
    if stored_entries(core) > STORED:  # what reducing left in memory is worth less than the memory
        for each in (core, *others):
            each.forget()


def search_prices(board: Board, core: Core, planes: list[Plane], seed: int, like: Priced | None = None,
                  rough: float = 0.0) -> tuple[Priced | None, list[Plane], list[np.ndarray]]:
    """Raise the bound over the row prices. Starts from `planes`, which hold for this problem if they hold for a part of
    its choices, and at the prices of `like`. What costs most of an answer is left out where it is within `rough` without.
    Returns the best prices' answer, all planes and the choices found."""
    best: Priced | None = None
    found: list[np.ndarray] = []
    planes, largest, rough = list(planes), like.largest if like else LARGEST_PAIR, max(rough, board.enough / 4)
    asked = [at for at, *_ in planes]
    for _ in range(TRIALS):
        if board.done:
            break
        prices, promised = _next_prices(core, planes) if planes else (_first_prices(core), math.inf)
        if best is None:
            priced = solve_priced(board, core, like.prices if like else prices, seed, 0.0 if planes else FIRST, rough, largest)
        elif _promises_more(best, promised) and (new := _not_asked(prices, best, asked)) is not None:
            worth = LOOSE * (promised - best.bound) / max(abs(best.bound), 1e-300)
            priced = solve_priced(board, core, new, seed, worth, rough, largest)
        elif best.loose:  # other prices may promise more than they can show: first see what these can
            priced = best = tighten(board, core, best, seed)
        else:
            break
        largest = priced.largest
        board.raise_bound(priced.bound, "row prices")
        if best is None or priced.bound > best.bound:
            best = priced
        if priced.choice is None:
            break
        board.offer(priced.choice, "row prices")
        found.append(priced.choice)
        asked.append(priced.prices)
        planes.append(_plane(board, core, priced.prices, priced.choice))
    return best, planes, found


def _first_prices(core: Core) -> np.ndarray:
    """Half of what excess costs; nothing for hard rows, which often do not bind, nor in large problems: llama 1B on (2, 4, 8) ended
    at worse prices from there, and its untied prices took three times as long with sweeps along the layers."""
    return np.where(np.isfinite(core.price) & (stored_entries(core) <= STORED), core.price / 2, 0.0)


def _promises_more(best: Priced, promised: float) -> bool:
    return promised > max(best.bound, best.value if best.choice is not None else -math.inf) + MARGIN * abs(best.bound)


def _not_asked(prices: np.ndarray, best: Priced, asked: list[np.ndarray]) -> np.ndarray | None:
    """`prices`, or some between them and the best. A plane is what the choice found costs: where the bound stayed below it,
    the same prices would seem the highest point for ever."""
    for _ in range(HALVINGS):
        if not any(np.allclose(prices, at, rtol=SAME, atol=0.0) for at in asked):
            return prices
        prices = (prices + best.prices) / 2
    return None


def close(board: Board, core: Core, best: Priced | None, seed: int, nodes: int = MIP_NODES,
          widest: float = ROOMS[-1]) -> None:
    """Assume that the optimum is little above the bound: then few strategies are possible. The best of them is optimal
    when it is as cheap as assumed; if there is none so cheap, the assumption is a bound. `nodes`: of a MIP's tree."""
    if best is None:
        return
    unit = abs(best.bound)
    for room in ROOMS:
        if board.done or room > widest:
            return
        if best.bound + room * unit <= board.bound:
            continue  # nothing is there
        if room * unit < UNLIKELY * (best.value - best.bound) and room != ROOMS[-1]:
            continue  # the bound is that far from what it could be
        upper = best.bound + room * unit
        if board.cost < upper + room * unit:
            upper = board.cost
        try:
            small = _narrowed(board, core, best, upper, seed)
            if not _fits_mip(small, upper - best.bound <= NEARBY * unit):
                return
            answer = solve_left(board, small, seed, nodes)
        except Infeasible:
            board.raise_bound(upper * (1 - math.copysign(MARGIN, upper)), "nothing cheaper")
            continue
        if answer.choice is not None:
            board.offer(small.lift(answer.choice), "few strategies left")
        board.raise_bound(min(upper, answer.bound), "few strategies left")
        if not answer.proven:
            return


def _fits_mip(core: Core, near: bool) -> bool:
    """Whether a MIP is likely to solve it. `near`: whether the assumed cost is within `NEARBY` of the bound."""
    entries = table_entries(core)
    return entries <= TABLES or near and entries <= COPIES * TABLES and stored_entries(core) <= TABLES


def _narrowed(board: Board, core: Core, best: Priced, upper: float, seed: int) -> Core:
    """`core` with the strategies that a choice of cost at most `upper` may take. What is left reduces further when it is
    priced again, which tells more strategies to be too dear."""
    large = stored_entries(core) > STORED
    while True:
        small = core.copy(own_memo=large)
        _keep_possible(small, best.possible(upper))
        reduce_core(small, board.clock.expired)
        left = table_entries(small)
        if not left or left > ENOUGH * table_entries(core) or board.clock.expired():
            return small
        core, best = small, solve_priced(board, small, best.prices, seed, largest=best.largest)


def _keep_possible(core: Core, masks: dict[int, np.ndarray]) -> None:
    left = {v: kept for v, mask in masks.items() if core.cost[v] is not GONE and (kept := core.memo(_kept, mask)) is not None}
    for v, kept in left.items():
        if not len(kept):
            raise Infeasible(v)
        if len(kept) == 1 and np.isfinite(core.cost[v][kept[0]]):
            core.fix(v, int(kept[0]))
    for v, kept in left.items():
        if core.cost[v] is not GONE:
            core.keep(v, kept)


def _kept(mask: np.ndarray) -> np.ndarray | None:
    """None where all strategies are."""
    return None if mask.all() else np.flatnonzero(mask)


def _planes(board: Board, core: Core) -> list[Plane]:
    """What choices near an optimum of a similar problem say about prices."""
    return [_plane(board, core, np.zeros(len(core.limit)), choice) for choice in board.near]


def _plane(board: Board, core: Core, prices: np.ndarray, choice: np.ndarray) -> Plane:
    excess = row_loads(board.problem, choice) - board.problem.row_limit
    return prices, choice_value(board, core, prices, choice), np.where(core.price > 0, excess, 0.0)


def _next_prices(core: Core, planes: list[Plane]) -> tuple[np.ndarray, float]:
    """Kelley's cutting planes: every priced solve is a plane over the prices that the bound stays below, so the highest
    point under all planes is the next to try, and its height what is still possible."""
    model = mathopt.Model()
    caps = np.where(np.isfinite(core.price), core.price, _cap(core, planes))
    height = model.add_variable(lb=-math.inf, ub=math.inf)
    share = [model.add_variable(lb=0.0, ub=1.0) for _ in caps]  # of each cap
    steepest = max(float(np.abs(slope * caps).max(initial=0.0)) for _, _, slope in planes)
    unit = abs(planes[0][1]) or steepest or 1.0  # solver tolerances are absolute: count in parts of the first bound
    for at, bound, slope in planes:
        terms = [float(g * cap / unit) * x for g, cap, x in zip(slope, caps, share, strict=True) if g and cap]
        model.add_linear_constraint(height <= float((bound - np.dot(slope, at)) / unit) + mathopt.fast_sum(terms))
    model.maximize(height)
    result = mathopt.solve(model, mathopt.SolverType.GLOP)
    if not result.has_primal_feasible_solution():
        return planes[-1][0], -math.inf
    prices = caps * np.clip([result.variable_values(x) for x in share], 0.0, 1.0)
    return prices, float(result.objective_value()) * unit


def _cap(core: Core, planes: list[Plane]) -> np.ndarray:
    """A hard row has no largest price; allow what prices the whole limit at the bound, and more while it helps."""
    highest = np.max([at for at, _, _ in planes], axis=0)
    reach = np.max([np.abs(slope) for _, _, slope in planes], axis=0)
    size = np.where(core.limit != 0.0, np.abs(core.limit), reach)
    return np.maximum(abs(planes[0][1]) / np.maximum(size, 1e-30), 4.0 * highest)
