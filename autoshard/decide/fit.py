"""Plans that fit in memory: first by the search's memory rows, then by the timeline of the plan found.

The rows of the formulation count only bytes that every plan holds, so their bound is valid for every plan. A plan found under them
is played. If it exceeds the limit, the limits of the rows are lowered by the excess, and the search is repeated. If that does not
help, the moment gets its own row. The plan returned fits exactly. Every search runs on a share of one clock, so all of them
together keep its time limit, and Ctrl-C stops each.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoshard.decide.make_plan import Plays
from autoshard.formulate.memory_rows import limited, with_row, without_idle
from autoshard.formulate.problem_of import Formulation, unreachable
from autoshard.play.timeline import Timeline
from autoshard.search import Board, Clock, solve
from autoshard.search.board import TIED, Progress
from autoshard.search.problem import Edge, Problem, Solution, Status, evaluate, row_loads

ROUNDS, LOWERED = 5, 3  # in the first of them limits are lowered, in the others moments get rows
FIRST = 0.7  # of the time goes into the first search; what its plan's timeline says is worked in with the rest
MOMENTS = 6  # stretches of a step whose fullest moments get rows in one round
STEP = 0.01  # of the limit, taken off per round

Measure = Callable[[np.ndarray], Timeline]
"""The timeline of a choice."""


@dataclass(frozen=True, eq=False)
class Asked:
    """A search problem with the timelines of its choices (`played`) and its starting plans (`known`)."""

    formulation: Formulation
    played: Plays
    known: list[np.ndarray]


def search_within(formulation: Formulation, limit: float, *, measure: Measure, clock: Clock, incumbents: Sequence[np.ndarray],
                  **options) -> Solution:
    """The cheapest plan found whose timeline stays within `limit` bytes, in what is left of `clock`."""
    problem = formulation.problem
    incumbents = possible(problem, incumbents)
    answer = solve(problem, clock=clock.part(FIRST), incumbents=incumbents, **options)
    if answer.choice is None and answer.status is not Status.INFEASIBLE:
        answer = fit_memory(formulation, answer, clock=clock.part(FIRST), **options)
    if answer.choice is None:
        return answer
    return _played(formulation, limit, answer, measure, incumbents, clock, **options)


def search_ample(formulation: Formulation, *, clock: Clock, incumbents: Sequence[np.ndarray], progress: Progress | None = None,
                 **options) -> Solution:
    """The cheapest plan with ample memory. Where layers repeat and the cheapest tied plan certainly does not fit, that one is
    returned. The bound holds for any memory limit, and for programs with recomputation."""
    problem, rows = formulation.problem, np.array(list(formulation.memory_rows.values()))

    def watch(*facts: Any) -> None:
        if progress:
            progress(*facts)
        board.clock.stop |= facts[-1] == TIED and not fits(problem, rows, board.choice)

    board = Board(ample(problem), clock.part(), watch)
    return solve(board.problem, board=board, incumbents=incumbents, **options)


def without_slack(formulation: Formulation, limit: float) -> float:
    """The peak a timeline may have within `limit` bytes, without the allocator's slack."""
    return limit / (1.0 + formulation.table.cluster.device.allocator_slack)


def fits_exactly(formulation: Formulation, timeline: Timeline, limit: float) -> bool:
    """Whether a plan's timeline, with the allocator's slack, stays within `limit` bytes."""
    return timeline.peak * (1.0 + formulation.table.cluster.device.allocator_slack) <= limit


def with_bound(solution: Solution, bound: float) -> Solution:
    """The solution with another bound."""
    return replace(solution, bound=bound) if solution.choice is None else _settled(replace(solution, bound=bound), solution.choice, solution.cost)


def cheapest_known(formulation: Formulation, limit: float, measure: Measure, choices: Sequence[np.ndarray]) -> Solution:
    """The cheapest of the choices whose timeline stays within `limit` bytes."""
    aim = without_slack(formulation, limit)
    best = _cheapest_fitting(formulation.problem, choices, measure, aim)
    return _settled(NOTHING, *best) if best else NOTHING


def _played(formulation: Formulation, limit: float, first: Solution, measure: Measure, incumbents: Sequence[np.ndarray],
            clock: Clock, **options) -> Solution:
    """`first` if its timeline fits; else the best of further rounds and of the plans known. The bound stays that of `first`: later
    limits are corrected by one plan and prove nothing."""
    aim = without_slack(formulation, limit)
    last, known, near, lowered, by_rows = first, list(incumbents), first.near, formulation, formulation
    found, over = first, measure(first.choice).peak - aim
    for n in range(ROUNDS):
        if over <= 0 or clock.expired():
            break
        if n < LOWERED and found.choice is None:
            continue
        if n < LOWERED:
            grown = lowered = _lowered(lowered, measure(last.choice), last.choice, aim)
        else:
            grown = by_rows = _grown(by_rows, measure(last.choice), last.choice, aim * (1.0 - STEP * (n - LOWERED)))
        share = min(1.0, 2 / (ROUNDS - n))  # a search that is cut short is worth little: most end long before, and few rounds are needed
        found = solve(grown.problem, clock=clock.part(share), incumbents=incumbents, near=near, **options)
        if found.choice is not None:
            last, over, near = found, measure(found.choice).peak - aim, found.near or near
            known.append(found.choice)
        elif n >= LOWERED:
            break
    if last is first and over <= 0:
        return first
    best = _cheapest_fitting(formulation.problem, known, measure, aim)
    return _settled(first, *best) if best else replace(first, choice=None, cost=np.inf, status=Status.UNKNOWN)


def _lowered(formulation: Formulation, timeline: Timeline, choice: np.ndarray, aim: float) -> Formulation:
    """Lower limits of the rows there are, by what the plan's timeline is over where they count: most moments are fuller than the
    turn by as much in all plans near this one."""
    total, loads = timeline.live.sum(axis=1), row_loads(formulation.problem, without_idle(formulation, choice))
    for moment, row in formulation.memory_rows.items():
        there = total[-1:] if moment == "update" else total[:-1] if len(total) > 1 else total
        over = float(there.max()) - aim
        if over > 0:
            formulation = limited(formulation, moment, loads[row] - over)
    return formulation


def _cheapest_fitting(problem: Problem, choices: Sequence[np.ndarray], measure: Measure, aim: float) -> tuple[np.ndarray, float] | None:
    """The cheapest choice whose timeline stays within `aim` bytes, with its cost. A row corrected by one plan may forbid another
    plan that fits, so all known plans are checked here. A choice that exceeds a row of the problem itself cannot fit."""
    for cost, i in sorted((evaluate(problem, c), i) for i, c in enumerate(choices)):
        if np.isfinite(cost) and measure(choices[i]).peak <= aim:
            return choices[i], cost
    return None


def stored_is_too_much(formulation: Formulation) -> bool:
    """Whether stored tensors alone exceed the limit at the end of a step, for any placements and any recomputation."""
    row = formulation.memory_rows["update" if formulation.table.graph.training else "turn"]
    return least_possible(formulation.problem, row) > formulation.problem.row_limit[row]


def least_possible(problem: Problem, row: int) -> float:
    """A lower bound on the row's load: the sum of every node's least amount. If it exceeds the limit, nothing fits."""
    return float(sum(least.min() for least in _with_memory(problem, np.array([row]), 1.0, _free)))


def possible(problem: Problem, choices: Iterable[np.ndarray]) -> list[np.ndarray]:
    """The choices that are feasible with enough memory. Where seeds fix placements, a baseline may be infeasible."""
    enough = ample(problem)
    return [c for c in map(np.asarray, choices) if np.isfinite(evaluate(enough, c))]


def _settled(first: Solution, choice: np.ndarray, cost: float) -> Solution:
    proven = cost - first.bound <= 1e-9 * abs(cost)
    return replace(first, choice=choice, cost=cost, bound=min(first.bound, cost), status=Status.OPTIMAL if proven else Status.GAP)


def _grown(formulation: Formulation, timeline: Timeline, choice: np.ndarray, aim: float) -> Formulation:
    """A row, or a lower limit of the row there is, for the fullest moment of every stretch of the step that is too full;
    the row's limit makes up for what the row miscounts of this plan."""
    total, choice = timeline.live.sum(axis=1), without_idle(formulation, choice)
    for stretch in np.array_split(np.arange(len(total)), min(MOMENTS, len(total))):
        t = int(stretch[np.argmax(total[stretch])])
        if total[t] > aim:
            moment = timeline.moment_of(t)
            formulation = with_row(formulation, moment)
            load = row_loads(formulation.problem, choice)[formulation.memory_rows[moment]]
            formulation = limited(formulation, moment, aim - (total[t] - load))
    return formulation


NOTHING = Solution(None, np.inf, -np.inf, Status.UNKNOWN, 0.0)


def fits(problem: Problem, rows: np.ndarray, choice: np.ndarray) -> bool:
    return bool(np.all(row_loads(problem, choice)[rows] <= problem.row_limit[rows]))


def fit_memory(formulation: Formulation, first: Solution, *, clock: Clock, progress: Callable | None = None,
               **options) -> Solution:
    """Where the search found nothing that fits: price the memory rows, and close in on the price at which plans fit.

    At price m per byte the problem has no memory rows, and its bound minus m x the limits is a bound of the whole. The next
    price makes the cheapest plan known that fits and the best that does not equally dear (secant). Returns `first`
    when nothing fits."""
    problem = formulation.problem
    rows = np.array(list(formulation.memory_rows.values()))
    least = solve(least_memory(problem, rows), clock=clock.part(1 / (ROUNDS + 2)), **options)
    if least.choice is None or not fits(problem, rows, least.choice):
        return first
    best = _Point.of(problem, rows, least.choice)
    price, over, bound = 0.0, None, first.bound
    for n in range(ROUNDS + 1):
        if clock.expired():
            break
        answer = solve(memory_priced(problem, rows, price), clock=clock.part(1 / (ROUNDS + 1 - n)), incumbents=(best.choice,), **options)
        bound = max(bound, answer.bound - price * float(problem.row_limit[rows].sum()))
        point = _Point.of(problem, rows, answer.choice)
        if point.excess <= 0 and point.seconds < best.seconds:
            best = point
        elif point.excess > 0:
            over = point
        else:
            break
        if progress:
            gap = (best.seconds - bound) / max(abs(best.seconds), 1e-300)
            progress(best.seconds, bound, gap, answer.seconds, "memory priced")
        if over is None:
            break
        price = max(0.0, (best.seconds - over.seconds) / (over.excess - best.excess))
    return _settled(replace(first, bound=bound), best.choice, best.seconds)


@dataclass(frozen=True, eq=False)
class _Point:
    """A choice with the bytes it is over on its worst memory row (negative: room), and its cost when memory is ample."""

    choice: np.ndarray
    excess: float
    seconds: float

    @staticmethod
    def of(problem: Problem, rows: np.ndarray, choice: np.ndarray) -> "_Point":
        excess = row_loads(problem, choice)[rows] - problem.row_limit[rows]
        return _Point(choice, float(excess.max()), evaluate(ample(problem), choice))


def ample(problem: Problem) -> Problem:
    """The problem with more memory than any choice can use."""
    limits = problem.row_limit.copy()
    for row in np.flatnonzero(np.isinf(problem.row_price)):
        limits[row] = unreachable(problem.items, row)
    return replace(problem, row_limit=limits)


def memory_priced(problem: Problem, rows: np.ndarray, price: float) -> Problem:
    """Memory at `price` seconds per byte on each of `rows` instead of limited."""
    return replace(ample(problem), node_costs=_with_memory(problem, rows, price, lambda c: c))


def least_memory(problem: Problem, rows: Iterable[int]) -> Problem:
    """The problem of using as little as possible of the memory `rows` together: forbidden stays forbidden, the rest is free."""
    tables: dict[int, np.ndarray] = {}
    edges = []
    for e in problem.edges:
        if id(e.table) not in tables:
            tables[id(e.table)] = _free(e.table)
        edges.append(Edge(e.u, e.v, tables[id(e.table)], e.rows, e.cols))
    costs = _with_memory(problem, np.array(list(rows)), 1.0, _free)
    return Problem(costs, tuple(edges), groups=problem.groups)


def _free(costs: np.ndarray) -> np.ndarray:
    """0 where a cost is finite, infinite elsewhere."""
    return np.where(np.isfinite(costs), 0.0, np.inf)


def _with_memory(problem: Problem, rows: np.ndarray, price: float, base: Callable[[np.ndarray], np.ndarray]) -> tuple[np.ndarray, ...]:
    """base(node cost) + price x memory per node; nodes alike share their array, as presolve likes it."""
    items, made = problem.items, {}
    on = np.flatnonzero(np.isin(items.row, rows))
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
