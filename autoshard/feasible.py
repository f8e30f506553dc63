"""Tight memory: find a plan that fits, or say why none does and how much memory the least plan needs."""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.errors import InfeasibleError
from autoshard.formulate import MEMORY, Formulation, unreachable
from autoshard.search import solve
from autoshard.search.problem import Edge, Problem, Solution, Status, evaluate, row_loads

SECONDS = 30.0
ROUNDS = 4


def search_within(formulation: Formulation, limit: float, *, time_limit: float, incumbents: Sequence[np.ndarray],
                  progress: Callable | None = None, **options) -> Solution:
    """Solve. Where no known plan fits, memory is tight: then a plan that fits is looked for first, in half the time."""
    problem, start = formulation.problem, time.monotonic()
    loads = [row_loads(problem, np.asarray(c))[MEMORY] for c in incumbents]
    fitted = None
    if loads and min(loads) > limit:
        nothing = Solution(None, np.inf, -np.inf, Status.UNKNOWN, 0.0)
        fitted = fit_memory(formulation, nothing, limit=limit, time_limit=time_limit / 2, progress=progress, **options)
        if fitted.choice is not None:
            incumbents = (fitted.choice,)
    left = max(1.0, time_limit - (time.monotonic() - start))
    answer = solve(problem, time_limit=left, incumbents=incumbents, progress=progress, **options)
    return answer if fitted is None or answer.choice is None else replace(answer, bound=max(answer.bound, fitted.bound))


def explain_infeasible(formulation: Formulation, solution: Solution, limit: float) -> InfeasibleError:
    """The error to raise: the memory the fastest plan wants, a proven lower bound, and the least found."""
    problem = formulation.problem
    least = solve(least_memory(problem), time_limit=SECONDS)
    if least.choice is None:
        return InfeasibleError("no choice of strategies satisfies all seeds, whatever the memory; "
                               "take seeds away until a plan exists, or leave dims open with ...")
    free = solve(ample(problem), time_limit=SECONDS)
    wants = row_loads(problem, free.choice)[MEMORY] if free.choice is not None else least.cost
    certain = "" if least.bound > limit else f" (not proven: the search stopped, {solution.status.value})"
    return InfeasibleError(
        f"no plan fits in {_text(limit)} per rank{certain}: the fastest plan needs {_text(wants)} for parameters, "
        f"gradients, optimizer state and saved activations; no plan needs less than {_text(least.bound)} (proven), and the "
        f"least found needs {_text(least.cost)}. Raise the memory budget, use more ranks or a smaller batch")


def _text(nbytes: float) -> str:
    """Bytes for a message, in the largest unit that leaves a number above 1."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes:.0f} bytes"


def fit_memory(formulation: Formulation, first: Solution, *, limit: float, time_limit: float,
               progress: Callable | None = None, **options) -> Solution:
    """Where the search found nothing that fits: price the memory row, and close in on the price at which plans fit.

    At price m per byte the problem has no memory row, and its bound minus m x limit is a bound of the whole. The next
    price makes the cheapest plan known that fits and the best that does not equally dear (secant). Returns `first`
    when nothing fits."""
    problem, share = formulation.problem, time_limit / (ROUNDS + 2)
    least = solve(least_memory(problem), time_limit=share, **options)
    if least.choice is None or least.cost > limit:
        return first
    fits = _Point.of(problem, least.choice)
    price, over, bound = 0.0, None, first.bound
    for _ in range(ROUNDS + 1):
        answer = solve(memory_priced(problem, price), time_limit=share, incumbents=(fits.choice,), **options)
        bound = max(bound, answer.bound - price * limit)
        point = _Point.of(problem, answer.choice)
        if point.memory <= limit and point.seconds < fits.seconds:
            fits = point
        elif point.memory > limit:
            over = point
        else:
            break
        if progress:
            gap = (fits.seconds - bound) / max(abs(fits.seconds), 1e-300)
            progress(fits.seconds, bound, gap, answer.seconds, "memory priced")
        if over is None:
            break
        price = max(0.0, (fits.seconds - over.seconds) / (over.memory - fits.memory))
    proven = fits.seconds - bound <= 1e-9 * abs(fits.seconds)
    return replace(first, choice=fits.choice, cost=fits.seconds, bound=min(bound, fits.seconds),
                   status=Status.OPTIMAL if proven else Status.GAP)


@dataclass(frozen=True, eq=False)
class _Point:
    """A choice with its memory and its cost when memory is ample."""

    choice: np.ndarray
    memory: float
    seconds: float

    @staticmethod
    def of(problem: Problem, choice: np.ndarray) -> "_Point":
        return _Point(choice, float(row_loads(problem, choice)[MEMORY]), evaluate(ample(problem), choice))


def ample(problem: Problem) -> Problem:
    """The problem with more memory than any choice can use."""
    limits = problem.row_limit.copy()
    limits[MEMORY] = unreachable(problem.items, MEMORY)
    return replace(problem, row_limit=limits)


def memory_priced(problem: Problem, price: float) -> Problem:
    """Memory at `price` seconds per byte instead of limited."""
    return replace(ample(problem), node_costs=_with_memory(problem, price, lambda c: c))


def least_memory(problem: Problem) -> Problem:
    """The problem of using as little of the memory row as possible: forbidden stays forbidden, the rest is free."""
    tables: dict[int, np.ndarray] = {}
    edges = []
    for e in problem.edges:
        if id(e.table) not in tables:
            tables[id(e.table)] = np.where(np.isfinite(e.table), 0.0, np.inf)
        edges.append(Edge(e.u, e.v, tables[id(e.table)], e.rows, e.cols))
    costs = _with_memory(problem, 1.0, lambda c: np.where(np.isfinite(c), 0.0, np.inf))
    return Problem(costs, tuple(edges), groups=problem.groups)


def _with_memory(problem: Problem, price: float, base: Callable[[np.ndarray], np.ndarray]) -> tuple[np.ndarray, ...]:
    """base(node cost) + price x memory per node; nodes alike share their array, as presolve likes it."""
    items, made = problem.items, {}
    on = np.flatnonzero(items.row == MEMORY)
    order = on[np.argsort(items.node[on], kind="stable")]
    nodes, starts = np.unique(items.node[order], return_index=True)
    amounts = dict(zip(nodes.tolist(), np.split(order, starts[1:]) if len(nodes) else (), strict=True))
    out = []
    for n, cost in enumerate(problem.node_costs):
        where = amounts.get(n, on[:0])
        key = (id(cost), items.strategy[where].tobytes(), items.amount[where].tobytes())
        if key not in made:
            extra = np.zeros(len(cost))
            np.add.at(extra, items.strategy[where], items.amount[where])
            made[key] = base(cost) + price * extra
        out.append(made[key])
    return tuple(out)
