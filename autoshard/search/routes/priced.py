"""The problem at fixed prices of its rows: no rows are left, so it reduces well, and its bound is usually tight."""
from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autoshard.search.board import MARGIN, Board
from autoshard.search.clock import Phase
from autoshard.search.dual.copies import Alike, carry_on
from autoshard.search.dual.dual import ROUNDS, Dual
from autoshard.search.dual.excess import loose_nodes
from autoshard.search.dual.packed import along
from autoshard.search.problem import priced_cost
from autoshard.search.reductions import Infeasible, drop_forbidden, reduce_core
from autoshard.search.reductions.core import GONE, Core, stored_entries, table_entries
from autoshard.search.reductions.pairs import merge_pairs
from autoshard.search.routes.bucket_elimination import Eliminated, Elimination
from autoshard.search.routes.joining import close_by_joining
from autoshard.search.routes.milp import TABLES, solve_left
from autoshard.search.routes.neighbourhoods import improve
from autoshard.search.routes.small import shrink

GAPS = (1e-5, 1e-3, 1e-2, 4e-2)  # assumed where the bound is not tight, widened while nothing is found
LARGEST_PAIR = 200  # joint strategies; larger pairs cost more to reduce than their bound is worth
LOOSE, LARGER_PAIRS = 2e-4, (400, 729)  # relative gap of the bound above which they are tried; see `_answer`
HUGE_PAIR = 2100  # where nodes are not joined, around what makes the bound loose: two weights of 45 layouts, on three axes with inner shards
AROUND = (2, 2, 3, 4, 6)  # how far from it, in edges, one after the other
MANY = 100  # strategies of the largest node, from which on the largest pairs are made at once: on three axes a weight has 27 layouts
LARGE = 4_000_000  # table entries; above, no MIP follows
STORED = 2_000_000  # of distinct tables; above, what one price computed is not kept for the next
LOOSE_TO_JOIN = 1e-1  # above, larger pairs are not tried before
FAR = 1e-3  # relative gap of the bound, above which nodes are joined
JOIN_SHARE, ROUGH_SHARE = 0.9, 0.3  # of the time left, a net
JOINABLE = 1_500_000  # table entries up to which they are
WITHIN = 0.02  # relative gap of the best choice known, from which on its cost tells strategies to be too dear
BETWEEN = 3  # rounds of sweeps between looks
COARSE = 5e-3  # relative gap; who asks for no more wants to know which strategies are cheap, and sweeps end where the bound hardly rises


@dataclass(frozen=True, eq=False)
class Priced:
    """What the problem at `prices` gave: a `bound` that holds for the problem with rows, and the best choice found, or
    None. `value` is what that choice costs at these prices: the bound, where it is tight. `loose`: more could be had at
    these prices, see `tighten`. `largest`, `around`: pairs that the bound needed, and nodes of the core among which the largest were made; near
    these prices it will need them again."""

    prices: np.ndarray
    bound: float
    value: float
    choice: np.ndarray | None
    dual: Dual | Eliminated
    since: int
    loose: bool
    largest: int
    around: frozenset[int] = frozenset()

    def possible(self, upper: float, place: np.ndarray | None = None) -> dict[int, np.ndarray]:
        """Masks of the strategies of the core before pricing that a choice of cost at most `upper` may take. `place`: as `Tied.place`; copies then
        keep what one of them may take, so that what follows is computed once for all."""
        masks = self.dual.possible(upper)
        if place is not None:
            masks = _shared(masks, place)
        return masks if isinstance(self.dual, Eliminated) else self.dual.core.widen(masks, upper - self.bound + MARGIN * abs(upper), self.since)


def _shared(masks: dict[int, np.ndarray], place: np.ndarray) -> dict[int, np.ndarray]:
    """One mask for all copies of a node with as many strategies."""
    joined: dict[tuple[int, int], np.ndarray] = {}
    for v, mask in masks.items():
        key = int(place[v]), len(mask)
        joined[key] = mask | joined[key] if key in joined else mask
    return {v: joined[int(place[v]), len(mask)] for v, mask in masks.items()}


def keep_possible(core: Core, masks: dict[int, np.ndarray]) -> None:
    """Keep the strategies of `masks` (`Priced.possible`). Raises Infeasible where a node has none."""
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


def solve_priced(board: Board, core: Core, prices: np.ndarray, seed: int, enough: float = 0.0, rough: float = 0.0,
                 largest: int = LARGEST_PAIR, alike: Alike | None = None, joins: bool = True, around: frozenset[int] = frozenset(),
                 order: Elimination | None = None, beaten: float = -math.inf) -> Priced:
    """The problem at `prices`, up to a relative gap of `enough`; within `rough` no larger pairs and no MIP are tried. Pairs of
    up to `largest` joint strategies are made at once, of a large problem none but the largest, among nodes that are `around` what needed them
    elsewhere. `alike`: what is known of a large problem at these prices; `joins`: whether nodes may be joined for a bound;
    `order`: of `core`'s nodes, where they are best minimised out one by one; `beaten`: a bound from other prices: where the choice found costs no
    more at these, they prove no more, and only that choice is of use. Raises Infeasible when no choice is possible whatever the rows."""
    prices = np.minimum(prices, core.price)  # a row that became part of the costs has no price any more
    if order is not None:
        return _solved_exactly(board, core, prices, order, largest)
    large = stored_entries(core) > STORED
    free = core.copy(own_memo=large or largest > LARGEST_PAIR)
    free.price_rows(prices)
    reduce_core(free, board.clock.expired)
    plain = free.copy() if joins and not large and table_entries(free) <= JOINABLE and not board.clock.expired() else None
    if large:  # sweeps are usually exact without pairs, which cost more than they do
        largest, around = 0, around if alike is None else alike.nodes(free.alive)
    else:
        many = max((len(free.cost[v]) for v in free.alive), default=0) >= MANY
        largest = LARGER_PAIRS[-1] if many else max(largest, LARGEST_PAIR)
    merge_pairs(free, largest, board.clock.expired)
    if around:
        merge_pairs(free, HUGE_PAIR, board.clock.expired, around)
    if board.clock.expired():
        drop_forbidden(free)
    if large:
        free.forget()
    dual = Dual(free, nodes=None if large else along(free), alike=True)
    if alike is not None and large:
        alike.begin(dual)
    return _answer(board, core, prices, dual, len(core.undo), seed, largest, enough, rough, plain, alike, around, beaten)


def _solved_exactly(board: Board, core: Core, prices: np.ndarray, order: Elimination, largest: int) -> Priced:
    free = core.copy()
    free.price_rows(prices)
    answer = order.solve(free)
    if not math.isfinite(answer.value):
        raise Infeasible(-1)
    choice = core.lift(answer.choice())
    return Priced(prices, answer.value, choice_value(board, core, prices, choice), choice, answer, len(core.undo), False, largest)


def tighten(board: Board, core: Core, priced: Priced, seed: int, enough: float = 0.0) -> Priced:
    """Go on where `solve_priced` stopped, up to a relative gap of `enough`. With one, sweeps end where the bound meets the choice that was found;
    without, dear strategies go on the way."""
    if isinstance(priced.dual, Eliminated):
        return priced
    alike = None if priced.choice is None or not enough else Alike(priced.choice)
    return _answer(board, core, priced.prices, priced.dual, priced.since, seed, priced.largest, enough, alike=alike, around=priced.around)


def _answer(board: Board, core: Core, prices: np.ndarray, dual: Dual, since: int, seed: int, largest: int, enough: float, rough: float = 0.0,
            plain: Core | None = None, alike: Alike | None = None, around: frozenset[int] = frozenset(), beaten: float = -math.inf) -> Priced:
    """Where layouts compete, larger pairs are worth their size: those of activations that both windows read, of 16 layouts each
    (llama 70B in bf16 with fp32 masters, 4 % too low without); of weights on three axes, which have 27. `plain`: the core before pairs
    were made."""
    known = board.cost if plain is None else math.inf
    reached = math.inf if alike is None else choice_value(board, core, prices, alike.choice)
    dual, bound, picked, value = _converged(board, dual, enough, known, reached)
    rough = math.inf if min(value, reached) <= beaten else rough
    most = math.inf if plain is None else LOOSE_TO_JOIN
    for step in AROUND if plain is None else [size for size in LARGER_PAIRS if size > largest]:
        if not max(LOOSE, enough, rough) * abs(bound) < min(value, reached) - bound <= most * abs(bound) or stored_entries(dual.core) > LARGE:
            break
        if plain is None:
            best = picked if alike is None or value <= reached else dual.core.project(alike.choice)[dual.nodes]
            better, near = _paired_around(board, dual, best, step)
        else:
            better, near, largest = _paired(board, dual, step), frozenset(), step
        if better is not None:
            dual, around = better, around | near
            proven, picked, value = dual.converge(Phase(board.clock, 0.5), enough)
            bound = max(bound, min(proven, known))
    choice = None
    if math.isfinite(value):
        full = np.zeros(len(core.cost), dtype=np.int64)
        full[dual.nodes] = picked
        choice = dual.core.lift(full)
    if alike is not None and reached <= value:
        value, choice = reached, alike.choice
    if plain is not None and value - bound > max(FAR, enough, rough) * abs(bound):
        rows = bool((np.isfinite(core.price) & (core.price > 0)).any())  # without, these prices are the last
        bound, value, choice = _joined(board, core, prices, plain, bound, value, choice, enough if rows else board.enough, rough)
    loose = value - bound > MARGIN * abs(bound)
    if value - bound > max(MARGIN, enough, rough) * abs(bound) and table_entries(dual.core) <= LARGE:
        bound, choice = _widen(board, dual, bound, min(value, known), choice, seed)
        loose = False
    if choice is not None:
        value = choice_value(board, core, prices, choice)
    return Priced(prices, bound, value, choice, dual, since, loose and max(enough, rough) > 0.0, largest, around)


def _paired(board: Board, dual: Dual, largest: int, among: frozenset[int] | None = None) -> Dual | None:
    """With pairs of up to `largest` joint strategies more; None where there are none to make."""
    joined = dual.core.copy()
    merge_pairs(joined, largest, board.clock.expired, among)
    if board.clock.expired():
        drop_forbidden(joined)
    return Dual(joined, nodes=along(joined), alike=True) if len(joined.undo) > len(dual.core.undo) else None


def _paired_around(board: Board, dual: Dual, choice: np.ndarray, edges: int) -> tuple[Dual | None, frozenset[int]]:
    """With the largest pairs so near to where `choice` costs more than what is proven, and those nodes. Of 2,600 nodes of llama 1B on (2, 4, 8) two
    have all of what the bound lacks, and pairs among the hundred around them prove it; pairs everywhere take three times the memory."""
    if (choice < 0).any():
        return None, frozenset()
    near = loose_nodes(dual, choice)
    for _ in range(edges):
        near |= {w for v in near for w in dual.core.adj[v]}
    better = _paired(board, dual, HUGE_PAIR, frozenset(near))
    if better is not None:
        carry_on(better, dual)
    return better, frozenset(near)


def _converged(board: Board, dual: Dual, enough: float, known: float, reached: float = math.inf) -> tuple[Dual, float, np.ndarray, float]:
    """`dual.converge`, without the strategies that no choice of cost at most `known` takes, as soon as the bound tells them: of the last sweeps most
    would be about these. The bound is at most `known`. `reached`: what some choice costs at these prices. Where that is the optimum the sweeps end
    there, and all strategies stay. Returns what is left, too."""
    phase = Phase(board.clock, 0.5)
    rounds = BETWEEN if math.isfinite(known) and not math.isfinite(reached) else ROUNDS
    bound, picked, value = dual.converge(phase, enough, reached, rounds)
    bound = min(bound, known)  # `dual` may be what was left before
    while not dual.ended:
        left = dual.without_dearer(known) if known - bound <= WITHIN * abs(bound) else None
        if left is not None:
            dual, picked, value = left, np.full(len(left.nodes), -1), math.inf  # of its strategies none was picked yet
        proven, now, least = dual.converge(phase, enough, rounds=BETWEEN)
        gained, bound = min(proven, known) - bound, max(bound, min(proven, known))
        if least < value:
            picked, value = now, least
        if enough >= COARSE and gained <= enough / 4 * abs(bound):
            break
    return dual, bound, picked, value


def _joined(board: Board, core: Core, prices: np.ndarray, plain: Core, bound: float, value: float, choice: np.ndarray | None,
            enough: float, rough: float) -> tuple[float, float, np.ndarray | None]:
    """(bound, value, choice) after nodes were joined. The best choice known comes first, made cheaper, for what it costs at `prices`
    limits what is looked for; not where a hard row has a price, for that row is what the choice is dear for. An answer that may be rough bounds
    nothing, and most of the time is left for others."""
    if board.choice is not None:
        if not (prices_hard_rows(core, prices) or board.stats.get("improved")):
            improve(board)
            board.stats["improved"] = True
        known = choice_value(board, core, prices, board.choice)
        if known < value:
            value, choice = known, board.choice
    joined = close_by_joining(plain, board.clock.part(ROUGH_SHARE if rough else JOIN_SHARE), bound, value, max(enough, rough))
    if joined.choice is not None:
        value, choice = joined.value, plain.lift(joined.choice)
    return joined.bound, value, choice


def prices_hard_rows(core: Core, prices: np.ndarray) -> bool:
    """Whether a hard row has a price, as where memory is tight."""
    return bool((np.isinf(core.price) & (prices > 0)).any())


def choice_value(board: Board, core: Core, prices: np.ndarray, choice: np.ndarray) -> float:
    """What a choice costs at `prices`."""
    paid = always_paid(board, core)
    return priced_cost(board.problem, choice, np.where(paid > 0, paid, prices))


def always_paid(board: Board, core: Core) -> np.ndarray:
    """The prices of rows that presolve found to be over their limit whatever is chosen: they are part of the costs by now."""
    return np.where((core.price == 0) & (board.problem.row_price > 0), board.problem.row_price, 0.0)


def _widen(board: Board, dual: Dual, bound: float, value: float, choice: np.ndarray | None,
           seed: int) -> tuple[float, np.ndarray | None]:
    """Assume that the best is a little above the bound, remove what would cost more and solve the rest, until it is found."""
    first = bound
    for gap in GAPS:
        upper = min(value, first + gap * max(abs(first), 1e-12))
        try:
            small = shrink(board, dual, upper)
            if table_entries(small) > TABLES:
                break
            answer = solve_left(board, small, seed)
        except Infeasible:
            bound = max(bound, upper)
            continue
        bound = max(bound, min(answer.bound, upper))
        if answer.choice is not None:
            return bound, small.lift(answer.choice)
        if not answer.infeasible:
            break
    return bound, choice
