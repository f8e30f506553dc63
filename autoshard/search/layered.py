"""The route of whole models: equal layers tied, priced rows by multipliers, the registered backend underneath."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autoshard.search import solve
from autoshard.search.priced import solve_priced
from autoshard.search.problem import Problem, Solution, Status, evaluate
from autoshard.search.tying import Tied, tie


def solve_layered(problem: Problem, *, time_limit: float, incumbents: Sequence[np.ndarray] = (),
                  progress: Callable | None = None, **options) -> Solution:
    """Like `solve`. Where layers repeat, the bound and the gap are those among tied plans, and the status says so;
    a tied problem that turns out infeasible is tried untied."""
    tied = tie(problem)
    if tied is None:
        return solve_priced(problem, solve, time_limit=time_limit, incumbents=incumbents, progress=progress, **options)
    starts = tuple(project(tied, np.asarray(c)) for c in incumbents)
    answer = solve_priced(tied.quotient, solve, time_limit=time_limit, incumbents=starts, progress=progress, **options)
    if answer.choice is None:
        return solve_priced(problem, solve, time_limit=time_limit, incumbents=incumbents, progress=progress, **options)
    choice, status = tied.lift(answer.choice), answer.status
    untied = min(incumbents, key=lambda c: evaluate(problem, np.asarray(c)), default=None)
    if untied is not None and evaluate(problem, np.asarray(untied)) < answer.cost:
        return Solution(np.asarray(untied), evaluate(problem, np.asarray(untied)), -np.inf, Status.TIME_LIMIT, answer.seconds, answer.stats)
    stats = {**answer.stats, "nodes_tied": tied.quotient.n}
    return replace(answer, choice=choice, status=Status.OPTIMAL_TIED if status is Status.OPTIMAL else status, stats=stats)


def project(tied: Tied, choice: np.ndarray) -> np.ndarray:
    """A tied choice from an untied one: every group takes what its first member has."""
    out = np.zeros(tied.quotient.n, dtype=np.int64)
    out[tied.node_of[::-1]] = choice[::-1]
    return out
