"""The large route: first any choice that fits; then prices from several dual schedules, annealed tree moves on every
thread, cores that shrink as the gap closes, and a bound all along. It ends at the time limit, or earlier when what is left
is small enough to prove."""
from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from autoshard.search.board import Board
from autoshard.search.clock import Phase
from autoshard.search.dual import messages
from autoshard.search.dual.dual import Dual
from autoshard.search.reductions import Infeasible
from autoshard.search.reductions.core import Core, table_entries
from autoshard.search.routes import moves
from autoshard.search.routes.small import search_small, shrink

STEPS = (0.1, 0.3, 0.05, 0.03)
FACTORS = (1.0, 1.01, 1.03, 1.1, 1.3, 2.0, 10.0)
HOT, COLD = 2e-5, 2e-8  # temperatures, in parts of the cost
TREE = 100  # most nodes of one tree
NOISE = 1.0
CHUNK = 500
EXACT_TABLES = 60_000
REPAIR = 0.1  # of the cost: how much the prices of overloaded rows grow between chunks while a walker does not fit
PATIENCE = 30  # chunks
CLIMBING = 1e-3  # of the bound in five rounds of sweeps
LONGEST = 3.0
REPEAT_SHARE = 0.3  # of the steps, where prices are known
TRIALS = 10  # chunks before starts are compared


@dataclass
class Walker:
    """One thread's search: its choice with loads, its best, and its random state."""

    choice: np.ndarray
    best: np.ndarray
    load: np.ndarray
    tally: np.ndarray  # cost, violation, best cost, factor on the prices
    rng: np.ndarray
    prices: np.ndarray


def search_large(board: Board, core: Core, seed: int, threads: int) -> None:
    prices: np.ndarray | None = None
    if board.choice is None:
        first_fitting(board, core, seed)
    shares = (0.35, 0.5, 0.5, 0.6, 1.0)
    for turn, share in enumerate(shares):
        if board.done:
            return
        dual = best_dual(board, core, prices, threads, 0.2 if turn == 0 else 0.08)
        board.raise_bound(dual.reduce(math.inf)[1], "message passing")
        walk(board, dual, seed * 1000 + turn, threads, share, 1.0 if turn == 0 else 0.3 ** turn)
        if board.done or turn == len(shares) - 1:
            return
        try:
            core, prices = shrink(board, dual, board.cost), dual.row_prices()
        except Infeasible:
            board.raise_bound(board.cost, "nothing cheaper")
            return
        board.report(f"core of {len(core.alive)} nodes")
        if table_entries(core) <= EXACT_TABLES:
            search_small(board, core, seed)


def first_fitting(board: Board, core: Core, seed: int) -> None:
    """A choice that fits, whatever it costs: prices need long before what they suggest fits, and aim better when they
    know a cost. Given up after `PATIENCE` chunks without progress, or half the time."""
    dual, phase = Dual(core), Phase(board.clock, 0.5)
    walker = _walker(dual, _decoded(dual, 1.0), seed)
    least, waited = walker.tally[moves.OVER], 0
    while walker.tally[moves.OVER] > 0.0 and waited < PATIENCE and not phase.over():
        _move(dual, walker, HOT * max(abs(walker.tally[moves.COST] + core.constant), 1e-300))
        phase.tick(CHUNK)
        waited = 0 if walker.tally[moves.OVER] < 0.99 * least else waited + 1
        least = min(least, walker.tally[moves.OVER])
    board.clock.work += phase.work
    _offer(board, dual, walker)


def best_dual(board: Board, core: Core, prices: np.ndarray | None, threads: int, share: float) -> Dual:
    """One schedule per thread, then again, with smaller steps, from the best one's prices."""
    first = _best_climb(board, core, prices, threads, share, None)
    best = _best_climb(board, core, first.row_prices(), threads, share, first)
    if math.isfinite(best.state[messages.FITTING]):
        board.offer(best.core.lift(_spread(best, best.best_choice)), "prices")
    return best


def _best_climb(board: Board, core: Core, prices: np.ndarray | None, threads: int, share: float, before: Dual | None) -> Dual:
    """The highest of one climb per thread, from the messages of `before`, and of `before` itself."""
    target = board.cost if math.isfinite(board.cost) else None
    factor = 1.0 if prices is None else REPEAT_SHARE
    duals = [Dual(core, prices) for _ in range(threads)]
    for dual in duals:
        if before is not None:
            dual.message[:] = before.message
    climbs = [_Climb(dual, board, share / 2, threads) for dual in duals]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda job: job[0].ascend(job[1], target=target, step=factor * job[2]), zip(duals, climbs, cycle(STEPS))))
    board.clock.work += sum(c.phase.work for c in climbs)
    if before is not None:
        duals.append(before)
    best = max(duals, key=lambda d: d.bound)
    cheapest = min(duals, key=lambda d: float(d.state[messages.FITTING]))
    best.state[messages.FITTING], best.best_choice = cheapest.state[messages.FITTING], cheapest.best_choice
    return best


class _Climb:
    """A phase of the dual that may last `LONGEST` times its share while the bound still climbs steeply, as it does on a
    busy machine: poor prices make every later move poor."""

    def __init__(self, dual: Dual, board: Board, share: float, workers: int):
        self.dual = dual
        self.phase, self.usual = (Phase(board.clock, x, workers) for x in (min(0.5, LONGEST * share), share))
        self.bounds: list[float] = []

    def tick(self, work: int) -> None:
        self.phase.tick(work)
        self.usual.tick(work)
        self.bounds.append(self.dual.bound)

    def over(self) -> bool:
        if self.phase.over() or not self.usual.over():
            return self.phase.over()
        before, now = self.bounds[-5:][:1], self.dual.bound  # five rounds are a few hundred sweeps
        return bool(self.dual.prices.any() and before and now <= before[0] + CLIMBING * abs(now))


def walk(board: Board, dual: Dual, seed: int, threads: int, share: float, heat: float) -> None:
    """Anneal on every thread for a share of the time; the best choice goes to the board."""
    walkers = _walkers(board, dual, seed, threads, 0.3 * share, heat)
    phases = [Phase(board.clock, share, threads) for _ in walkers]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda job: _anneal(board, dual, job[0], job[1], heat), zip(walkers, phases, strict=True)))
    board.clock.work += sum(p.work for p in phases)
    for walker in walkers:
        _offer(board, dual, walker)


def _anneal(board: Board, dual: Dual, walker: Walker, phase: Phase, heat: float) -> None:
    scale = heat * max(abs(walker.tally[moves.COST] + dual.core.constant), 1e-300)
    offered, told = walker.tally[moves.BEST], phase.clock.seconds
    while not phase.over():
        _move(dual, walker, scale * HOT * (COLD / HOT) ** phase.fraction)
        phase.tick(CHUNK)
        if walker.tally[moves.BEST] < offered and phase.clock.seconds - told > 2.0:
            _offer(board, dual, walker)
            offered, told = walker.tally[moves.BEST], phase.clock.seconds


def _move(dual: Dual, walker: Walker, temperature: float) -> None:
    """A chunk of moves. While the walker does not fit, the rows it overloads get dearer first."""
    p = dual.packed
    if walker.tally[moves.OVER] > 0.0:
        excess = np.where(np.isinf(p.price), np.maximum(0.0, walker.load - p.slack), 0.0) / p.scale
        total = float(excess.sum())
        if total > 0.0:
            cost = abs(walker.tally[moves.COST] + dual.core.constant)
            growth = REPAIR * max(cost if np.isfinite(cost) else 1.0, 1e-300)  # a start may stand on a forbidden pair
            walker.prices = walker.prices + growth * excess / total / p.scale
        walker.tally[moves.FACTOR] = 1.0
    moves.anneal(p, walker.choice, walker.best, walker.load, walker.tally, walker.prices, walker.rng, CHUNK, TREE,
                 temperature, temperature, NOISE)


def _offer(board: Board, dual: Dual, walker: Walker) -> None:
    if walker.tally[moves.BEST] + dual.core.constant < board.cost:
        board.offer(dual.core.lift(_spread(dual, walker.best)), "annealing")


def _spread(dual: Dual, packed_choice: np.ndarray) -> np.ndarray:
    full = np.zeros(len(dual.core.cost), dtype=np.int64)
    full[dual.nodes] = packed_choice
    return full


def _walkers(board: Board, dual: Dual, seed: int, threads: int, share: float, heat: float) -> list[Walker]:
    """The most promising starts, one per thread: what a start is worth shows after a few moves, when it fits."""
    found = [_walker(dual, choice, seed * 64 + i) for i, choice in enumerate(_starts(board, dual))]
    phases = [Phase(board.clock, share, len(found)) for _ in found]

    def try_out(walker: Walker, phase: Phase) -> None:
        scale = heat * HOT * max(abs(walker.tally[moves.COST] + dual.core.constant), 1e-300)
        for trial in range(TRIALS):
            if phase.over():
                return
            _move(dual, walker, scale * (COLD / HOT) ** (trial / TRIALS))
            phase.tick(CHUNK)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(try_out, found, phases))
    board.clock.work += sum(p.work for p in phases)
    found.sort(key=lambda w: (w.tally[moves.BEST], w.tally[moves.OVER]))
    _offer(board, dual, found[0])
    more = [_walker(dual, found[i % len(found)].choice, seed * 64 + i) for i in range(len(found), threads)]
    return [*found[:threads], *more]


def _walker(dual: Dual, choice: np.ndarray, seed: int) -> Walker:
    p = dual.packed
    load = messages.row_loads(p, choice)
    over, cost = moves.violation(load, p), messages.total_cost(p, choice) + moves.excess_cost(load, p)
    rng = np.array([np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] | np.uint64(1)], dtype=np.uint64)
    tally = np.array([cost, over, cost if over <= 0.0 else np.inf, 1.0])
    return Walker(choice.copy(), choice.copy(), load.copy(), tally, rng, dual.best_prices.copy())


def _starts(board: Board, dual: Dual) -> list[np.ndarray]:
    """Decodings at rising prices, and the best choice so far where this core can still express it."""
    found = [_decoded(dual, factor) for factor in FACTORS]
    if math.isfinite(dual.state[messages.FITTING]):
        found.append(dual.best_choice)
    if board.choice is not None:
        found.append(_repaired(dual, dual.core.project(board.choice)[dual.nodes]))
    return found


def _decoded(dual: Dual, factor: float) -> np.ndarray:
    p, message = dual.packed, dual.message.copy()
    cost, theta = np.empty_like(p.cost), np.empty_like(p.cost)
    messages.priced_costs(p, dual.best_prices * factor, cost)
    for _ in range(5):
        messages.sweep(p, cost, message, theta, False)
        messages.sweep(p, cost, message, theta, True)
    choice = np.zeros(len(dual.nodes), dtype=np.int64)
    messages.decode(p, cost, message, choice)
    return choice


def _repaired(dual: Dual, choice: np.ndarray) -> np.ndarray:
    """Fill entries of -1: each takes its cheapest strategy given the neighbours that are known."""
    p = dual.packed
    for v in np.flatnonzero(choice < 0):
        k = p.start[v + 1] - p.start[v]
        cost = p.cost[p.start[v]:p.start[v] + k].copy()
        for a in range(p.adj_ptr[v], p.adj_ptr[v + 1]):
            w = p.adj_node[a]
            if choice[w] >= 0:
                width = p.start[w + 1] - p.start[w]
                cost += p.table[p.adj_table[a]:p.adj_table[a] + k * width].reshape(k, width)[:, choice[w]]
        choice[v] = int(np.argmin(cost))
    return choice
