"""Prices of the rows: cutting planes, a few solves."""
from __future__ import annotations

import math

import numpy as np
from ortools.math_opt.python import mathopt

from autoshard.search.board import MARGIN, Board
from autoshard.search.dual.copies import Alike
from autoshard.search.problem import Seen, row_loads, seen
from autoshard.search.reductions import Infeasible, reduce_core
from autoshard.search.reductions.core import Core, stored_entries, table_entries
from autoshard.search.routes.bucket_elimination import Elimination
from autoshard.search.routes.keeping import most_cost, steep_prices
from autoshard.search.routes.milp import TABLES
from autoshard.search.routes.priced import (
    LARGEST_PAIR,
    STORED,
    Priced,
    always_paid,
    choice_value,
    keep_possible,
    solve_priced,
    tighten,
)

TRIALS, EXACT_TRIALS = 16, 64  # answers; where one takes milliseconds
FIRST, LOOSE = 1e-3, 0.02  # relative gaps at which to leave the first prices; others, as part of what new prices promise
LOOSELY, LOOSELY_PAIRED, ROOM = 1e-2, 0.1, 3e-4  # relative: how close the first two prices are answered where tables are large, without and with
# pairs; what costs so much more there is hardly the best at others
ROUGHLY = 1e-2  # relative: how close a choice that is over hard rows by as little as possible is looked for
SETTLED = 3e-4  # relative gap of the best choice known at which large problems are asked no further prices; and what others must promise
WHOLE = 4e-4  # relative gap at which to leave the best prices of a large problem: what is left when dear strategies go settles the rest
SAME, HALVINGS = 1e-6, 4  # relative difference of prices that are the same; steps from prices that were asked back to the best
FAR, STRIDE = 2e-3, 0.1  # of the best bound: prices that promise more are asked in steps of half of it, at most so long
LITTLE = 10  # parts of the gap at which the search ends: a part is worth no more answers, and no more of one
WHEN = 2  # answers after which it is asked whether any choice keeps the hard rows, if those found do not

Plane = tuple[np.ndarray, float, np.ndarray]
"""(prices, cost of some choice at these prices, its loads above the limits): the bound at other prices is at most
cost + excess x change of prices."""


def search_prices(board: Board, core: Core, planes: list[Plane], seed: int, like: Priced | None = None, rough: float = 0.0,
                  alike: Alike | None = None, settled: float = 0.0, gain: float = MARGIN,
                  doubtful: bool = False) -> tuple[Priced | None, list[Plane], list[np.ndarray]]:
    """Raise the bound over the row prices. Starts from `planes`, which hold for this problem if they hold for a part of
    its choices, and at the prices of `like`. What costs most of an answer is left out where it is within `rough` without.
    `alike`: of a large problem at the first prices; `settled`: the relative gap of the best choice known that is enough; `gain`: what other
    prices must promise, relative; `doubtful`: whether it is likely that no choice keeps the rows.
    Returns the best prices' answer, all planes and the choices found."""
    best: Priced | None = None
    found: list[np.ndarray] = []
    begun = alike is not None and alike.tied is not None
    planes, largest, rough = list(planes), like.largest if like else LARGEST_PAIR, max(rough, board.enough / 4)
    around: frozenset[int] = frozenset()
    asked = [at for at, *_ in planes]
    order = Elimination.of(core)
    little = board.enough / LITTLE if order is None else 0.0
    for _ in range(TRIALS if order is None else EXACT_TRIALS):
        if board.done or best is not None and board.cost - best.bound <= settled * abs(best.bound):
            break
        if len(found) == (0 if doubtful and board.near else WHEN):
            kept = _keeping(board, core, [*board.near, *found], seed, order)
            found += kept
            planes += [plane(board, core, np.zeros(len(core.limit)), choice) for choice in kept]
        prices, promised = next_prices(core, planes, best if _in_steps(core, planes) else None) if planes else (_first_prices(core), math.inf)
        if best is None:
            prices = _within_sight(core, planes, prices)
            enough = max(little, WHOLE if begun else 0.0 if planes else FIRST)
            priced = solve_priced(board, core, like.prices if like else prices, seed, enough, rough, largest, alike, order=order)
        elif _promises_more(best, promised, max(little, 2 * WHOLE if begun else gain)) and (new := _not_asked(prices, best, asked)) is not None:
            worth = little + LOOSE * (promised - best.bound) / max(abs(best.bound), 1e-300)
            priced = solve_priced(board, core, new, seed, worth, rough, largest, around=around, order=order, beaten=best.bound)
        elif best.loose and not begun and best.value - best.bound > board.enough / 4 * abs(best.bound):
            # other prices may promise more than they can show: first see what these can
            priced = best = tighten(board, core, best, seed)
        else:
            break
        largest, around = priced.largest, priced.around
        board.raise_bound(priced.bound, "row prices")
        if best is None or priced.bound > best.bound:
            best = priced
        if priced.choice is None:
            break
        board.offer(priced.choice, "row prices")
        found.append(priced.choice)
        asked.append(priced.prices)
        planes.append(plane(board, core, priced.prices, priced.choice))
    return best, planes, found


def _keeping(board: Board, core: Core, found: list[np.ndarray], seed: int, order: Elimination | None) -> list[np.ndarray]:
    """Choices that are over hard rows by as little as possible, where those `found` and all their mixtures are over some and answers do not take
    long. Raises Infeasible where every choice is over some row."""
    new: list[np.ndarray] = []
    while board.choice is None and table_entries(core) <= TABLES and not board.clock.expired():
        steep = steep_prices(board.problem, core.price > 0, [*found, *new])
        if steep is None:
            break
        answer = solve_priced(board, core, steep, seed, FIRST, ROUGHLY, order=order)
        if answer.bound > most_cost(board.problem):
            raise Infeasible(None)
        if answer.choice is None or any(np.array_equal(answer.choice, choice) for choice in new):
            break
        board.offer(answer.choice, "least excess")
        new.append(answer.choice)
    return new


def search_large_prices(board: Board, core: Core, planes: list[Plane], seed: int,
                        rough: float, known: float = math.inf) -> tuple[Priced | None, list[Plane], list[np.ndarray]]:
    """As `search_prices`, where an answer takes long: most prices are asked only of what is cheap at the first two, a tenth of the time, and
    the last of them of the whole, for its bound. Where `planes` promise no more than the cost `known`, of a choice whose layers may differ, the
    best of their prices is the first, and the only one of these two."""
    told = bool(planes) and next_prices(core, planes)[1] <= known + SETTLED * abs(known) < math.inf
    first: list[Priced] = []
    found: list[np.ndarray] = []
    for _ in range(1 if told else 2):
        prices, promised = next_prices(core, planes) if planes else (_first_prices(core), math.inf)
        if first and not _promises_more(first[0], promised):
            break
        first.append(solve_priced(board, core, prices, seed, LOOSELY, LOOSELY_PAIRED))
        board.raise_bound(first[-1].bound, "row prices")
        if (choice := first[-1].choice) is None:
            return first[-1], planes, found
        board.offer(choice, "row prices")
        found.append(choice)
        planes = [*planes, plane(board, core, prices, choice)]
    apart = Board(board.problem, board.clock, enough=board.enough)
    for choice in found:
        apart.offer(choice)
    like = None
    try:
        like, planes, more = search_prices(apart, _cheap(board, core, first), planes, seed, rough=rough, settled=SETTLED)
        found += more
    except Infeasible:
        board.report("no cheap choice fits")  # says nothing about others
    for choice in found[len(first):]:
        board.offer(choice, "row prices")
    alike = Alike(like.choice) if like is not None and like.choice is not None else None
    best, planes, more = search_prices(board, core, planes, seed, like, rough, alike, SETTLED, gain=2 * WHOLE if told else SETTLED)
    return best, planes, [*found, *more]


def _cheap(board: Board, core: Core, answers: list[Priced]) -> Core:
    """`core` with what is cheap at the prices of some answer."""
    masks = [each.possible(each.bound + ROOM * abs(each.bound)) for each in answers]
    small = core.copy(own_memo=True)
    keep_possible(small, {v: np.logical_or.reduce([of[v] for of in masks]) for v in masks[0]})
    reduce_core(small, board.clock.expired)
    return small


def _first_prices(core: Core) -> np.ndarray:
    """Half of what excess costs; nothing for hard rows, which often do not bind, nor in large problems: llama 1B on (2, 4, 8) ended
    at worse prices from there, and its untied prices took three times as long with sweeps along the layers."""
    return np.where(np.isfinite(core.price) & (stored_entries(core) <= STORED), core.price / 2, 0.0)


def _within_sight(core: Core, planes: list[Plane], prices: np.ndarray) -> np.ndarray:
    """`prices` to begin with, without those of hard rows that no plane limits, as where all choices known exceed the row: from the largest price
    that is allowed the way back is long."""
    if not planes:
        return prices
    unlimited = np.isinf(core.price) & (prices >= (1.0 - SAME) * _cap(core, planes))
    return np.where(unlimited, 0.0, prices)


def _in_steps(core: Core, planes: list[Plane]) -> bool:
    """Whether prices that promise much more are approached in steps: where answers take long, and where some choice exceeds a hard row, whose
    price has no top."""
    hard = np.isinf(core.price)
    return stored_entries(core) > TABLES or any((excess[hard] > 0).any() for _, _, excess in planes)


def _promises_more(best: Priced, promised: float, than: float = MARGIN) -> bool:
    """`than`: the relative gain that is worth asking for."""
    return promised > _reached(best) + than * abs(best.bound)


def _reached(best: Priced) -> float:
    """What the planes promise at the best prices, where the bound there may be less."""
    return max(best.bound, best.value if best.choice is not None else -math.inf)


def _not_asked(prices: np.ndarray, best: Priced, asked: list[np.ndarray]) -> np.ndarray | None:
    """`prices`, or some between them and the best. A plane is what the choice found costs: where the bound stayed below it,
    the same prices would seem the highest point for ever."""
    for _ in range(HALVINGS):
        if not any(np.allclose(prices, at, rtol=SAME, atol=0.0) for at in asked):
            return prices
        prices = (prices + best.prices) / 2
    return None


def scaled(planes: list[Plane], factor: float) -> list[Plane]:
    """Planes of a problem whose costs and rows count `factor` times as much."""
    return [(at, factor * value, factor * excess) for at, value, excess in planes]


def planes_of(board: Board, core: Core) -> list[Plane]:
    """What choices near an optimum of a similar problem say about prices."""
    return [_plane_of(board, core, each) for each in (*seen(board.problem, board.near), *board.seen)]


def _plane_of(board: Board, core: Core, choice: Seen) -> Plane:
    """As `plane`, at prices of zero."""
    excess = choice.loads - board.problem.row_limit
    return np.zeros(len(core.limit)), choice.cost + float(np.dot(always_paid(board, core), excess)), np.where(core.price > 0, excess, 0.0)


def plane(board: Board, core: Core, prices: np.ndarray, choice: np.ndarray) -> Plane:
    """What a choice that was found at these prices says about the bound at others."""
    excess = row_loads(board.problem, choice) - board.problem.row_limit
    return prices, choice_value(board, core, prices, choice), np.where(core.price > 0, excess, 0.0)


def next_prices(core: Core, planes: list[Plane], best: Priced | None = None) -> tuple[np.ndarray, float]:
    """Kelley's cutting planes: every priced solve is a plane over the prices that the bound stays below, so the highest
    point under all planes is the next to try, and its height what is still possible. Where that is far above the `best` bound, the next to try is
    the point nearest to its prices that promises a part of it, as in level methods (Lemarechal, Nemirovskii and Nesterov, 1995): the first planes
    know nothing of high prices, and answers there take longest."""
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
    promised = float(result.objective_value()) * unit
    known = -math.inf if best is None else _reached(best)
    if best is not None and promised > known + FAR * abs(best.bound):
        height.lower_bound = (known + min(STRIDE * abs(best.bound), (promised - known) / 2)) / unit
        nearest = _nearest(model, share, np.minimum(best.prices / np.where(caps > 0, caps, 1.0), 1.0))
        result = nearest if nearest.has_primal_feasible_solution() else result
    return caps * np.clip([result.variable_values(x) for x in share], 0.0, 1.0), promised


def _nearest(model: mathopt.Model, share: list[mathopt.Variable], before: np.ndarray) -> mathopt.SolveResult:
    """The point of `model` whose shares change least in all from `before`."""
    change = [model.add_variable(lb=0.0) for _ in share]
    for x, moved, at in zip(share, change, before.tolist(), strict=True):
        model.add_linear_constraint(moved >= x - at)
        model.add_linear_constraint(moved >= at - x)
    model.minimize(mathopt.fast_sum(change))
    return mathopt.solve(model, mathopt.SolverType.GLOP)


def _cap(core: Core, planes: list[Plane]) -> np.ndarray:
    """A hard row has no largest price; allow what prices the whole limit at the bound, and more while it helps."""
    highest = np.max([at for at, _, _ in planes], axis=0)
    reach = np.max([np.abs(slope) for _, _, slope in planes], axis=0)
    size = np.where(core.limit != 0.0, np.abs(core.limit), reach)
    return np.maximum(abs(planes[0][1]) / np.maximum(size, 1e-30), 4.0 * highest)
