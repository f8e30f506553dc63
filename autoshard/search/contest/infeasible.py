"""Why nothing fits: the tightest time point, and the least feasible limit, when it can be proven."""
from __future__ import annotations

from dataclasses import replace

import numpy as np

from autoshard.search.problem import Intervals, Problem, Status
from autoshard.search.reductions import Infeasible
from autoshard.search.reductions.core import Core, build
from autoshard.search.reductions.dead import drop_dead


def explain(problem: Problem, seconds: float) -> str:
    """A sentence for the user; `seconds` bounds the search for the least limit."""
    times = problem.intervals
    if times is None:
        return "no choice is feasible: the forbidden pairs and the limits exclude every one"
    core = build(replace(problem, intervals=replace(times, limit=np.inf)))[0]
    try:
        _consistent(core)
    except Infeasible:
        return "no choice is feasible, whatever the usage limit: forbidden costs leave some node without a strategy"
    live = times.lo < times.hi
    if not live.any():
        return "no choice is feasible: the forbidden pairs exclude every one"
    starts = np.unique(times.lo[live])
    least = core.base[:len(starts)]
    tightest = int(np.argmax(least))
    text = (f"no choice is feasible: at time {starts[tightest]} the least usage is {least[tightest]:,.0f}, "
            f"and the limit is {times.limit:,.0f}")
    limit = _least_limit(problem, times, float(least[tightest]), seconds)
    return text if limit is None else f"{text}; the least limit that would be feasible is {limit:,.0f}"


def _consistent(core: Core) -> None:
    wave = core.alive
    while wave:
        changed = [v for v in wave if drop_dead(core, v)]
        wave = sorted({u for v in changed for u in core.adj[v]})


def _least_limit(problem: Problem, times: Intervals, low: float, seconds: float) -> float | None:
    """Bisect between a bound and a limit known to do; None when a step could not be decided in time."""
    from autoshard.search import solve  # the engine this module explains for

    def feasible(limit: float) -> bool | None:
        trial = replace(problem, intervals=replace(times, limit=limit))
        found = solve(trial, time_limit=seconds / 12)
        return True if found.choice is not None else False if found.status is Status.INFEASIBLE else None

    low = max(np.ceil(low), np.floor(times.limit) + 1)
    answer = feasible(low)
    if answer is not False:
        return low if answer else None
    high = float(times.amount.sum())
    if feasible(high) is not True:
        return None
    while high - low > 1:
        middle = float((low + high) // 2)
        answer = feasible(middle)
        if answer is None:
            return None
        low, high = (low, middle) if answer else (middle, high)
    return high
