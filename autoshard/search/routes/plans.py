"""The route of plans: a large problem with a handful of rows (memory, overlap windows), many equal layers.

At given row prices the problem has no rows and is solved exactly (`priced.py`); prices follow cutting planes, a few
solves (`prices.py`). At the best prices the bound is close, because many equal layers can balance a row between them. Then the
strategies that a choice within a small assumed gap may take are few: a MIP with the rows finds the best of them, and
if that is within the gap it is the optimum. Equal layers are first tied: the same on a problem of three layers."""
from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autoshard.base.memory import give_back_memory
from autoshard.search.board import MARGIN, Board, Event
from autoshard.search.clock import Clock
from autoshard.search.dual.copies import Alike
from autoshard.search.dual.dual import Dual
from autoshard.search.mip import guarded
from autoshard.search.problem import distinct, evaluate
from autoshard.search.reductions import Infeasible, reduce_core, settle_rows
from autoshard.search.reductions.core import Core, stored_entries, table_entries
from autoshard.search.routes.bucket_elimination import Elimination
from autoshard.search.routes.milp import MIP_NODES, TABLES, solve_left
from autoshard.search.routes.mixture import mix
from autoshard.search.routes.neighbourhoods import Neighbourhoods, improve
from autoshard.search.routes.priced import (
    STORED,
    Priced,
    choice_value,
    keep_possible,
    prices_hard_rows,
    solve_priced,
    tighten,
)
from autoshard.search.routes.prices import SAME, Plane, next_prices, planes_of, scaled, search_large_prices, search_prices
from autoshard.search.tie import Tied

ROOMS = (3e-5, 3e-4, 3e-3, 3e-2)  # assumed gaps, widened while nothing is found
LIKELY = 3e-4  # the widest of them before the best tied choice is known
NEARBY = 1e-3  # the same of the least cost known: then the best tied choice is not needed, and a MIP may have more entries
NEARLY = 1e-4  # relative gap at its best prices at which a large tied problem counts as solved there
DISTANT = 1e-2  # relative gap above which choices that treat layers alike are made cheaper and mixed, before the whole problem is looked at
ALIKE, ALIKE_SHARE = 4, 0.25  # how many of them; the part of the time left for each, a net
MIXED = 5e-4  # relative gap of a mixture of a few choices that needs no other
PART = 2  # of the best choices that keep the rows, and of those that do not: what is mixed first
COPIES = 8  # times more, of layers that look the same: no more may be distinct
HARD, HARD_SHARE = 8e-8, 0.25  # seconds per squared entry that a MIP takes where a hard row is full, about; the part of the time left that it may
UNLIKELY = 0.3  # of what a bound lacks at its own prices: the optimum is hardly nearer to it
TIED_SHARE = 0.6  # of the time: what is left must do for a bound of the untied problem
TIED_NODES = 200  # of a MIP's tree: what is best among tied choices helps, but proves nothing
ROUGH = 1e-3  # relative gap within which the tied problem is not solved closer at prices that are not the best
ROUGH_LARGE = 2e-2  # the same where tables are too large to keep, and larger pairs cost most of what an answer does
FEW_COPIES = 4  # of a layer
NEAR = 4  # choices that a problem solved at once leaves for the next one
CLOSE = 1e-3  # relative gap at which a search on large tables ends: prices of a profile are not known better, and proving the rest takes half as long
# again
FINE = 5e-5  # relative gap to which the best prices of a large problem are answered where the bound has to rise
ENOUGH = 0.8  # of the table entries left: another round is not worth it
AT_ONCE = 3  # times the table entries of a small assumed gap: with no more than that, all that is cheaper than the best choice is solved instead


@dataclass(frozen=True, eq=False)
class Quotient:
    """The problem with its layers tied, after the best prices of its rows were looked for: `best` is their answer. Costs and
    loads on `board` count per copy, see `tie.py`."""

    tied: Tied
    board: Board
    core: Core
    best: Priced | None

    @property
    def large(self) -> bool:
        return stored_entries(self.core) > STORED

    def solved(self) -> np.ndarray | None:
        """The choice found, for the whole problem, where `best` solves the tied one, or nearly where tables are large; else None."""
        if self.best is None or self.board.choice is None:
            return None
        solved = self.best.value - self.best.bound <= (NEARLY if self.large else MARGIN) * abs(self.best.bound)
        return self.tied.lift(self.board.choice) if solved else None

    def alike(self, large: bool) -> Alike | None:
        """What it tells of the whole problem at its best prices: a choice, and where tables are `large` also messages to begin with."""
        if self.best is None or self.best.choice is None:
            return None
        choice = self.tied.lift(self.best.choice)
        dual = self.best.dual
        return Alike(choice, self.tied, dual, self.best.around) if large and self.large and isinstance(dual, Dual) else Alike(choice)


def search_few_rows(board: Board, core: Core, seed: int, layers: tuple[Tied, Core] | None = None) -> None:
    """`layers`: the problem with its layers tied (`tied_core`), which goes first: its choices are starts, its planes a start.
    Then the problem itself. Where the tied one is solved at its best prices, layers only have to share a row: then the problem
    itself is likely to be proven without the best tied choice, and at one price. So is a small one at once where no hard row has a
    price: its MIP takes as long as the tied one's. Where a choice that is not near the bound does, what was met is mixed before the best tied choice
    is looked for. A few layers are not tied where a hard row may bind: their problem is hardly larger, has a choice
    within the row sooner, and bounds what is asked. A core of which one price is asked, or a few of one that is small, need not be reduced before:
    without rows it reduces further."""
    guarded.start()
    settle_rows(core)
    if layers is not None and layers[0].copies <= FEW_COPIES and (np.isinf(core.price) & (core.price > 0)).any():
        layers = None
    large = stored_entries(core) > STORED  # and what reducing finds out about it, for both problems, is forgotten
    if large:
        board.enough = max(board.enough, CLOSE)
        reduce_core(core, board.clock.expired)
    quotient, planes, pool = _search_tied(board, core, layers, seed)
    later = board.enough >= DISTANT  # a mixture of what was met may do
    if large:
        give_back_memory()
    tied_best = quotient.best if quotient is not None else None
    _mix_alike(board, quotient, [*board.near, *pool], seed)
    if quotient is not None and (choice := quotient.solved()) is not None:
        likely, reduced = True, not (quotient.core.price == 0)[core.price > 0].any()
        board.offer(choice, "layers tied", tied=True)
    else:
        likely, reduced = False, False
        if not later and not (large and board.seen):  # a plan is known then, and hardly dearer
            _close_tied(board, quotient, seed)
    if not large and not reduced:
        reduce_core(core, board.clock.expired)
    place = quotient.tied.place if quotient is not None else None
    alike = quotient.alike(stored_entries(core) > STORED) if quotient is not None else None
    best, _, found = search_prices(board, core, planes, seed, tied_best, alike=alike, doubtful=layers is not None and quotient is None)
    near = False
    if not board.done:  # a choice near the bound tells most strategies to be too dear
        _mix(board, core, best, [*pool, *found], seed)
        if later and not likely and not board.done:
            _close_tied(board, quotient, seed)
    if not board.done and best is not None and best.loose and (large or board.enough):  # a little more of the bound may do
        best = tighten(board, core, best, seed, FINE if large else 0.0)
        board.raise_bound(best.bound, "row prices")
    if likely:
        near = best is not None and board.cost - best.bound <= NEARBY * abs(best.bound)
        at_once = near or best is not None and table_entries(core) <= TABLES and not prices_hard_rows(core, best.prices)
        close(board, core, best, seed, widest=math.inf if at_once else LIKELY, place=place)
        if not (board.done or near and large):  # what would take as long again proves hardly more
            _close_tied(board, quotient, seed)
    if not (near and large):
        close(board, core, best, seed, place=place)
    board.near = [*board.near, *pool, *found]


def _mix(board: Board, core: Core, best: Priced | None, pool: list[np.ndarray], seed: int) -> None:
    """The best choices at the best prices that keep the rows and the best that do not are mixed first, which takes less time; then
    all that were met, if that is not near the bound."""
    if best is not None:
        value = {i: choice_value(board, core, best.prices, choice) for i, choice in enumerate(pool)}
        fits = {i: math.isfinite(evaluate(board.problem, choice)) for i, choice in enumerate(pool)}
        few = [i for wanted in (True, False) for i in sorted((i for i in value if fits[i] is wanted), key=value.__getitem__)[:PART]]
        mix(board, [pool[i] for i in few], seed)
    if not board.done and (best is None or board.cost - best.bound > MIXED * abs(best.bound)):
        mix(board, pool, seed)


def _mix_alike(board: Board, quotient: Quotient | None, pool: list[np.ndarray], seed: int) -> None:
    """Mix what neighbourhoods make of the cheapest of `pool` that treat the layers alike and keep the rows. Each ends at a choice that is good in
    other places, and all layers change at once, which takes a tenth of the time that neighbourhoods of the whole problem do."""
    if quotient is None or quotient.large or board.cost - board.bound <= DISTANT * abs(board.bound):
        return
    tied, ends = quotient.tied, []
    alike = distinct(choice for choice in pool if np.array_equal(choice, tied.lift(choice[tied.first])))
    fits = sorted((cost, i) for i, choice in enumerate(alike) if math.isfinite(cost := evaluate(board.problem, choice)))
    known = Neighbourhoods(tied.problem)
    for _, i in fits[:ALIKE]:
        own = Board(tied.problem, board.clock.part(ALIKE_SHARE))
        own.offer(alike[i][tied.first])
        improve(own, known=known)
        if own.choice is not None:
            quotient.board.offer(own.choice)
            ends.append(tied.lift(own.choice))
            board.offer(ends[-1], "neighbourhoods of equal layers")
    mix(board, ends, seed)


def solve_at_ends(board: Board, core: Core, seed: int) -> bool:
    """Whether the problem is solved at one price, guessed from choices near an optimum of a similar problem, `board.near`. It is looked at where that
    price is at an end in every row, none or all that excess costs: then no two layers have to share a row, and to tie them first would only
    find the price again."""
    settle_rows(core)
    if stored_entries(core) > STORED:
        return False
    prices, _ = next_prices(core, planes_of(board, core))
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
        return None, planes_of(board, core), []
    tied, quotient = layers
    own = Board(tied.problem, _share(board), enough=board.enough)
    if stored_entries(core) > STORED:  # its best choice comes late, and until then there would be none
        own.progress = lambda event: _tell(board, tied, own, event)
    if board.choice is not None:
        own.offer(board.choice[tied.first])  # what its first layer does, all may
    try:
        settle_rows(quotient)
        if stored_entries(quotient) > STORED:
            reduce_core(quotient, own.clock.expired)
        _spare(core, quotient)
        known = scaled(planes_of(board, quotient), 1 / tied.copies)
        if stored_entries(quotient) > STORED:
            best, planes, found = search_large_prices(own, quotient, known, seed, ROUGH_LARGE, board.cost / tied.copies)
        else:
            best, planes, found = search_prices(own, quotient, known, seed, rough=ROUGH)
    except Infeasible:
        board.report("no choice treats the layers alike")  # says nothing about untied ones
        return None, planes_of(board, core), []
    board.clock.cut |= own.clock.cut or own.clock.expired()
    return Quotient(tied, own, quotient, best), scaled(planes, tied.copies), [tied.lift(choice) for choice in found]


def _tell(board: Board, tied: Tied, own: Board, event: Event) -> None:
    """What is found with layers tied is a choice; whoever asked may give the search more time for it (`How.solve_until_tied`)."""
    if own.choice is not None and tied.copies * event.cost < board.cost:
        board.offer(tied.lift(own.choice), event.message)
        own.clock.time_limit = max(own.clock.time_limit, own.clock.seconds + TIED_SHARE * board.clock.left)


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


def _spare(core: Core, *others: Core) -> None:
    if stored_entries(core) > STORED:  # what reducing left in memory is worth less than the memory
        for each in (core, *others):
            each.forget()
        give_back_memory()


def close(board: Board, core: Core, best: Priced | None, seed: int, nodes: int = MIP_NODES,
          widest: float = ROOMS[-1], place: np.ndarray | None = None) -> None:
    """Assume that the optimum is little above the bound: then few strategies are possible. The best of them is optimal
    when it is as cheap as assumed; if there is none so cheap, the assumption is a bound. `nodes`: of a MIP's tree; `place`: of
    `Priced.possible`."""
    if best is None:
        return
    unit, hard = abs(best.bound), prices_hard_rows(core, best.prices)
    for room in ROOMS:
        if board.done or room > widest:
            return
        if best.bound + room * unit <= board.bound or room * unit < board.cost - best.bound <= NEARBY * unit:
            continue  # nothing is there, or the best choice known is near enough to be proven at once
        if room * unit < UNLIKELY * (best.value - best.bound) and room != ROOMS[-1]:
            continue  # the bound is that far from what it could be
        upper = best.bound + room * unit
        if board.cost < upper + room * unit:
            upper = board.cost
        try:
            small, upper = _assumed(board, core, best, upper, seed, place)
            if not _fits_mip(small, upper - max(best.bound, board.bound) <= NEARBY * unit, board.clock.left if hard else math.inf):
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


def _assumed(board: Board, core: Core, best: Priced, upper: float, seed: int, place: np.ndarray | None) -> tuple[Core, float]:
    """What `_narrowed` leaves below `upper`; or below the best choice known where that is hardly more, since a MIP that finds nothing below
    `upper` takes as long as one that ends the search. With the cost below which it is."""
    small = _narrowed(board, core, best, upper, seed, place)
    if not upper < board.cost < math.inf or stored_entries(core) > TABLES:
        return small, upper
    all_cheaper = _narrowed(board, core, best, board.cost, seed, place)
    return (all_cheaper, board.cost) if table_entries(all_cheaper) <= AT_ONCE * table_entries(small) else (small, upper)


def _fits_mip(core: Core, near: bool, seconds: float) -> bool:
    """Whether a MIP is likely to solve it. `near`: whether the assumed cost is within `NEARBY` of the bound; `seconds`: the time there is, where a
    hard row is full."""
    entries = table_entries(core)
    if HARD * entries**2 > HARD_SHARE * seconds:
        return False
    return entries <= TABLES or near and entries <= COPIES * TABLES and stored_entries(core) <= TABLES


def _narrowed(board: Board, core: Core, best: Priced, upper: float, seed: int, place: np.ndarray | None) -> Core:
    """`core` with the strategies that a choice of cost at most `upper` may take. What is left reduces further when it is
    priced again, which tells more strategies to be too dear."""
    large = stored_entries(core) > STORED
    while True:
        small = core.copy(own_memo=large)
        keep_possible(small, best.possible(upper, place))
        reduce_core(small, board.clock.expired)
        left = table_entries(small)
        if not left or left > ENOUGH * table_entries(core) or board.clock.expired():
            return small
        core, best = small, solve_priced(board, small, best.prices, seed, largest=best.largest, joins=not large, around=best.around,
                                         order=Elimination.of(small))
        board.raise_bound(min(best.bound, upper), "few strategies left")
