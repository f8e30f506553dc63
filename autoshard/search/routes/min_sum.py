"""Minimises a problem without rows and without a MIP: exact reductions as long as they help, then sweeps.

Reductions and pairs solve trees, and what is nearly one, exactly: every elimination joins at most two nodes at a time, so the
tables stay small. What is left, if anything, gets messages (`Dual.converge`), whose bound often meets the choice decoded from
them; where it does not, strategies that cost more than the best choice known are taken out, larger pairs are made, and the
sweeps run again. Of a problem that is too large for that the equal layers are tied, and there is no bound."""
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from autoshard.search.board import Board
from autoshard.search.clock import Clock, Phase
from autoshard.search.problem import Problem, Solution
from autoshard.search.reductions import Infeasible, drop_forbidden, reduce_core
from autoshard.search.reductions.core import Core, build, table_entries
from autoshard.search.reductions.pairs import merge_pairs
from autoshard.search.tie import tie

PAIRS = (200, 400, 729)  # joint strategies of the largest pair: the width of the elimination
LARGE = 4_000_000  # table entries that are left; above, equal layers are tied, and no larger pairs are made
SECONDS = 60.0  # a net: work ends it long before

if TYPE_CHECKING:
    from autoshard.search.dual.dual import Dual


def minimise(problem: Problem, known: Iterable[np.ndarray] = (), clock: Clock | None = None, like: Core | None = None,
             pairs: Sequence[int] = PAIRS) -> Solution:
    """The cheapest choice found, and a valid bound (-inf where layers were tied). `known`: choices to start from. Rows of the problem are not
    looked at: give one without. `like`: a core of much the same arrays, whose memo it shares. `pairs`: joint strategies of the largest pair, sweep
    by sweep. The status is OPTIMAL where the choice is proven."""
    board = Board(problem, clock or Clock(SECONDS))
    for choice in known:
        board.offer(choice)
    try:
        core, _ = build(problem, like)
        reduce_core(core, board.clock.expired)
        quotient = tie(problem) if table_entries(core) > LARGE else None
        if quotient is None or quotient.problem.n == problem.n:
            _solve(board, core, pairs)
        else:
            own = Board(quotient.problem, board.clock)
            core, _ = build(quotient.problem, core)
            reduce_core(core, board.clock.expired)
            _solve(own, core, pairs)
            if own.choice is not None:
                board.offer(quotient.lift(own.choice), "layers tied")
    except Infeasible:
        board.infeasible = board.choice is None
    return board.solution()


def _solve(board: Board, core: Core, pairs: Sequence[int]) -> None:
    """Raises Infeasible where nothing is possible, and no choice is known."""
    try:
        for largest in pairs:
            merge_pairs(core, largest, board.clock.expired)
            if board.clock.expired():
                drop_forbidden(core)
            core = _answered(board, core)
            if board.done or table_entries(core) > LARGE:
                return
    except Infeasible:
        if board.choice is None:
            raise
        board.raise_bound(board.cost, "nothing is cheaper")


def _answered(board: Board, core: Core) -> Core:
    """Offer the best choice of `core` and raise the bound; returns the core without what cannot be cheaper."""
    if not core.alive:
        board.offer(core.lift(np.zeros(board.problem.n, dtype=np.int64)), "eliminated")
        board.raise_bound(min(core.constant, board.cost), "eliminated")
        return core
    from autoshard.search.dual.dual import Dual  # loads the compiled sweeps
    from autoshard.search.dual.packed import along

    dual = Dual(core, nodes=along(core), alike=True)
    bound, picked, value = dual.converge(Phase(board.clock, 0.5))
    if math.isfinite(value):
        full = np.zeros(board.problem.n, dtype=np.int64)
        full[dual.nodes] = picked
        board.offer(core.lift(full), "sweeps")
    board.raise_bound(min(bound, board.cost), "sweeps")
    if board.done or not math.isfinite(board.cost):
        return core
    return _without_dearer(board, core, dual)


def _without_dearer(board: Board, core: Core, dual: Dual) -> Core:
    """Raises Infeasible where nothing is cheaper than the best choice."""
    left = core.copy()
    for v, mask in dual.possible(board.cost).items():
        if not mask.any():
            raise Infeasible(v)
        if not mask.all():
            left.keep(v, np.flatnonzero(mask))
    reduce_core(left, board.clock.expired)
    return left
