"""The best mixture of known choices: every node does what one of them does.

Searches that started from different choices end at choices that are good in different parts of the problem, and repeated layers balance on
a row where they follow different ones. What is left when every node may only do what a known choice does is small, and is solved with its rows.

Layers are mixed alike: what one of them does in a choice all may do, which makes a choice per layer, and the best mixture of these is
often far cheaper where layers differ to balance on a row. Neighbourhoods do not find it, for many layers change at once."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.search.board import MARGIN, Board
from autoshard.search.reductions import Infeasible, reduce_core
from autoshard.search.reductions.core import build, table_entries
from autoshard.search.routes.milp import TABLES, solve_left
from autoshard.search.tie import Tied

NODES = 50  # of a MIP's tree: more make the mixture of a large problem hardly cheaper, and nothing is proven by it


def mix(board: Board, pool: Sequence[np.ndarray], seed: int = 0) -> None:
    """Offer the cheapest choice of the problem in which every node does what it does in some choice of `pool`. Nothing is done where there
    are fewer than two, where the time is up, or where what is left of the problem is too large for a MIP."""
    if len(pool) < 2 or board.clock.expired():
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
            # of a large problem the best mixture takes as long as several answers at some prices
            answer = solve_left(board, core, seed, NODES, board.enough / 2 if board.problem.is_large else 0.0)
            if answer.choice is not None:
                board.offer(core.lift(answer.choice), "mixture of known choices")
    except Infeasible:
        return


def mix_layers(board: Board, tied: Tied) -> None:
    """Offer the cheapest choice in which every node does what it or its copy in another layer does in the best choice known, again and again
    while that is cheaper. Nothing is done where repeated layers, those of `tied`, are treated alike."""
    while board.choice is not None and len(each := tied.spread(board.choice)) > 1:
        before = board.cost
        mix(board, [board.choice, *each])
        if board.cost >= before - MARGIN * abs(before):
            return
