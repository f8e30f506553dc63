"""Closes the gap of a problem without rows, where message passing leaves one, by joining nodes (`reductions/joins.py`).

A round: sweep; take out strategies and pairs that would cost more than the upper bound; reduce; join. Each join makes the bound of the next
sweeps higher or the problem smaller, so that more can be taken out. A good upper bound is half of it: choices decoded from the sweeps are made
cheaper by neighbourhoods, and before the least cost known, one just above the bound is assumed. Then little is left, and either the optimum is found
there or the assumed cost has become a bound."""
from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autoshard.search.board import MARGIN, Board
from autoshard.search.clock import Clock, Phase
from autoshard.search.dual.dual import Dual
from autoshard.search.dual.packed import along
from autoshard.search.problem import Edge, Problem
from autoshard.search.reductions import Infeasible, drop_forbidden, reduce_core
from autoshard.search.reductions.core import Core, table_entries
from autoshard.search.reductions.joins import join_best
from autoshard.search.reductions.pairs import merge_pairs
from autoshard.search.routes.neighbourhoods import improve

FEW = 100  # joint strategies of pairs (`reductions/pairs.py`) that are made before
FIRST, LARGEST = 64, 3000  # possible strategies of a joint node: at first, and at most
GROWTH, SLOW = 1.5, 0.05  # they may be so many times more after a round that raised the bound by less than this part of the gap
LARGE = 3_000_000  # table entries, above which joint nodes grow no more
HUGE = 8_000_000  # above, it ends
CLOSER = 0.9  # of the gap that is enough: a part of the cost, where whoever asked takes it as one of the bound, must not miss it by a hair
ASSUMED = 5e-3  # of the bound: the first assumed gap


@dataclass(eq=False)
class Joined:
    """What is known of the problem: no choice costs less than `bound`; `value`: the least cost known, of `choice` (per node of the core;
    None where it was known before)."""

    bound: float
    value: float
    choice: np.ndarray | None = None


def close_by_joining(core: Core, clock: Clock, bound: float, value: float, enough: float = 0.0) -> Joined:
    """Raise `bound` to the optimum of `core`, which has no rows, or to within a relative gap of `enough`, as far as that is possible. `value`: a cost
    that is known to be reached. `core` is left as it is."""
    known, start = Joined(bound, value), core.copy(own_memo=True)
    merge_pairs(start, FEW, clock.expired)
    drop_forbidden(start)
    search = _Search(start, clock, known, enough)
    for assumed in (bound + ASSUMED * abs(bound), math.inf):
        if search.closed or not search.attempt(assumed):
            break
    if known.choice is not None:
        known.choice = start.lift(known.choice, len(core.undo))
    return known


class _Search:
    def __init__(self, core: Core, clock: Clock, known: Joined, enough: float) -> None:
        self.start, self.clock, self.known, self.enough = core, clock, known, CLOSER * max(enough, MARGIN)
        self.problem, self.place = _as_problem(core)

    @property
    def wanted(self) -> float:
        """What a choice must cost to be worth finding."""
        return self.known.value - self.enough * abs(self.known.value)

    @property
    def closed(self) -> bool:
        return self.known.bound >= self.wanted

    def attempt(self, assumed: float) -> bool:
        """Whether it is settled if a choice costs less than `assumed` and than `wanted`, and the bound says so."""
        core = self.start.copy(own_memo=True)
        try:
            settled = self._join_all(core, assumed)
        except Infeasible:
            settled = math.inf
        self.known.bound = max(self.known.bound, min(settled, assumed, self.wanted))
        return self.known.bound >= min(assumed, self.wanted)

    def _join_all(self, core: Core, assumed: float) -> float:
        """A bound of what costs no more than `assumed`. Raises Infeasible where there is no such choice."""
        largest, before, bound = FIRST, -math.inf, -math.inf
        while core.alive:
            upper = min(assumed, self.wanted)
            dual = Dual(core, nodes=along(core), alike=True)
            now, picked, value = dual.converge(Phase(self.clock, 0.5), upper=upper)
            bound = max(bound, now)
            if math.isfinite(value):
                self._offer(core, dict(zip(dual.nodes.tolist(), picked.tolist(), strict=True)), value)
            upper = min(assumed, self.wanted)
            if bound >= upper or self.clock.expired():
                return bound
            core, _ = dual.reduce(upper)
            core.forget()
            reduce_core(core, self.clock.expired)
            entries = table_entries(core)
            if self.clock.expired() or entries > HUGE:
                return bound
            joins = join_best(core, largest, upper - bound)
            reduce_core(core, self.clock.expired)
            drop_forbidden(core)
            if core.alive and not joins and (largest >= LARGEST or entries > LARGE):
                return bound
            if not joins or bound - before < SLOW * (upper - bound) and entries <= LARGE:
                largest = min(LARGEST, math.ceil(GROWTH * largest))
            before = bound
        self._offer(core, {}, core.constant)
        return core.constant

    def _offer(self, core: Core, picked: dict[int, int], value: float) -> None:
        """Keep a choice of `core` if it is the cheapest, made cheaper by neighbourhoods of the core at the start."""
        if value >= self.known.value:
            return
        full = np.zeros(len(core.cost), dtype=np.int64)
        full[list(picked)] = list(picked.values())
        board = Board(self.problem, self.clock.part())
        board.offer(core.lift(full, len(self.start.undo))[self.place])
        improve(board)
        if board.choice is not None and board.cost + self.start.constant < self.known.value:
            out = np.zeros(len(core.cost), dtype=np.int64)
            out[self.place] = board.choice
            self.known.choice, self.known.value = out, board.cost + self.start.constant


def _as_problem(core: Core) -> tuple[Problem, np.ndarray]:
    """A core without rows as a problem, and the core's node of each of its nodes."""
    nodes = core.alive
    number = {v: i for i, v in enumerate(nodes)}
    every = [np.arange(len(core.cost[v])) for v in nodes]
    edges = tuple(Edge(number[u], number[v], table.a, every[number[u]], every[number[v]])
                  for u in nodes for v, table in core.adj[u].items() if u < v)
    return Problem(tuple(core.cost[v] for v in nodes), edges), np.array(nodes, dtype=np.int64)
