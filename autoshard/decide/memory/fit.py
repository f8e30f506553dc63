"""Plans that fit in memory: first by the search's memory rows, then by the timeline of the plan found.

The rows of the formulation count only bytes that every plan holds, so their bound is valid for every plan. A plan found under them
is played. If it exceeds the budget, the limits of the rows are lowered by the excess, and the search is repeated. If that does not
help, the moment gets its own row. The plan returned fits exactly. Every search runs on a share of one clock, so all of them
together keep its time limit, and Ctrl-C stops each.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.decide.how import How
from autoshard.decide.memory.memory_problems import ample, fits_rows, least_memory, leaves_room, memory_priced, possible, rows_of
from autoshard.decide.program import NOTHING, Program, settled
from autoshard.formulate.floor_rows import Floors, floored_ops, with_floor
from autoshard.formulate.memory_rows import limited, with_rows, without_idle
from autoshard.formulate.problem_of import Formulation
from autoshard.play.footprint import Footprints
from autoshard.play.timeline import Timeline
from autoshard.search import neighbourhoods_of
from autoshard.search.board import Event
from autoshard.search.problem import Problem, Solution, Status, distinct, evaluate, row_loads

FLOORED = 6  # searches with floor rows
ROUND, FAR = 0.4, 0.1  # of the time for them, for the first, which may use up what it is given; a gap of a search that was cut short
ROUNDS, LOWERED = 5, 3  # in the first of them limits are lowered, in the others moments get rows
FIRST = 0.7  # of the time goes into the first search; what its plan's timeline says is worked in with the rest
BEFORE, SEEN = 0.5, 0.5  # of the time for the first search where floor rows may follow; of what is left then, for searches with them
ABOUT, ROUGHLY = 1e-2, 3e-2  # gaps at which searches end if their plans are starts of others, which see more of what is too full: of
# large problems, and of others; the rest of the time says more there, and what is lacking is looked for last
LONGEST, SHORT = 0.7, 0.5  # of a large problem: the most of the time left for floor rows; of what the first search took, too little for another
TIMES = 2  # what the first search took is given to the next one, whose phases have shares of it: with as long as that it was cut short
NEAR = 6  # moments behind the fullest one that may have a floor row; the row counts most where the op reads much
CLOSED = 2e-3  # a gap that needs no more searches
TIGHT = 5e-4  # a gap at which searches end whose plans hardly fit as they are: to fit costs them more than that
MOMENTS = 6  # stretches of a step whose fullest moments get rows in one round
ROUGH = 0.1  # of the share that a plan is over: the gap at which the next search may end, for limits as far off are moved again
STEP = 0.01  # of the limit, taken off per round
FILLED, FILLING, AROUND = 8, 0.5, 0.5  # searches that use what a plan leaves free; shares of the time left
FULL = 0.9  # of the limit; a moment as full may be too full in a plan that keeps more
MIXED = 2  # choices that fit, for a mixture
MET = 40  # choices that are kept for the next search
HOPELESS = 0.1  # of the limit, by which a choice within the rows takes more: limits lowered by as much lead to dear plans, more floor rows to others
LITTLE = 1e-4  # of the step: a search that gains less is the last one


def search_within(program: Program, how: How, brief: bool = False) -> Solution:
    """The cheapest plan found whose timeline stays within the budget. `brief`: only a bound where what rows allow is near it, but far from a plan
    that fits: more rows are to come."""
    learned, table, whole = program.learned, program.formulation.table, program.settings.get("inputs", "global") == "global"
    floors = Floors(program.formulation, Footprints(table.mesh, table.cluster), whole)
    program = _with_floors(program, floors, learned.floored)
    problem = program.formulation.problem
    program = replace(program, starts=tuple(possible(problem, (*program.starts, *learned.choices))))
    about = ABOUT if problem.is_large else ROUGHLY
    begin = how.part(BEFORE, about) if floors.possible else how.part(FIRST)
    answer = _solved(problem, program.starts, possible(problem, learned.near), begin)
    how = replace(how, enough=max(how.enough, TIGHT))
    if answer.choice is not None and floors.possible:
        program, answer = _floored(program, floors, answer, how.part(_as_long(problem, answer, SEEN, LONGEST, how), about))
    if answer.choice is None and answer.status is not Status.INFEASIBLE:
        answer = fit_memory(program.formulation, answer, how.part(FIRST))
    if brief and answer.choice is not None and answer.gap <= FAR and _is_far_over(program, answer.choice):
        learned.keep(answer)
        return replace(answer, choice=None, cost=np.inf, status=Status.UNKNOWN)
    found = answer if answer.choice is None else _filled(program, _corrected(program, answer, how), how.part(FILLING))
    if floors.possible and how.proves:
        found = _bounded(program, answer, _filled(program, found, how.part(FILLING)), how)
    learned.keep(found)
    return found


def search_on(program: Program, how: How) -> Solution:
    """The cheapest plan met that fits, made cheaper in the time left; it proves nothing."""
    best = program.cheapest_fitting((*possible(program.formulation.problem, program.learned.choices), *program.starts))
    return NOTHING if best is None else _filled(program, settled(NOTHING, *best), replace(how, enough=max(how.enough, TIGHT)))


def _is_far_over(program: Program, choice: np.ndarray) -> bool:
    return program.timelines(choice).peak > (1.0 + HOPELESS) * program.formulation.budget.peak


def _solved(problem: Problem, starts: Sequence[np.ndarray], near: Sequence[np.ndarray], how: How) -> Solution:
    """What a search finds from `starts`, and from choices met where rows had other limits: of these some need less memory, and where time is short
    nothing else may be found."""
    return how.solve(problem, (*starts, *near), near)


def _again(problem: Problem, program: Program, first: Solution, last: np.ndarray, near: Sequence[np.ndarray], how: How) -> Solution:
    """A search under limits that were corrected by the choice `last`, which proves nothing. Before it `last` is mixed with the cheapest choices met
    that keep the limits: layers that follow one or the other balance on a row. Where that costs little more than the bound, it is enough."""
    fitting = sorted((cost, i) for i, choice in enumerate(near) if np.isfinite(cost := evaluate(problem, choice)))
    mixed = how.mix(problem, [last, *(near[i] for _, i in fitting[:MIXED])]) if fitting else None
    if mixed is not None and mixed[1] - first.bound <= CLOSED * abs(first.bound):
        return settled(first, *mixed)
    return _solved(problem, (*program.starts, *([mixed[0]] if mixed else ())), near, how)


def _met(now: Sequence[np.ndarray], before: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Choices that searches have met, the last ones first, each once."""
    return tuple(distinct((*now, *before))[:MET])


def _bounded(program: Program, seen: Solution, found: Solution, how: How) -> Solution:
    """`found` with what most of the time that is left adds to its bound: `seen`, the search of the program's problem, may have been cut short. A
    cheaper choice that it finds is corrected as that of `seen` was."""
    if found.choice is None or found.gap <= CLOSED or seen.gap <= TIGHT or how.clock.expired():
        return found
    problem = program.formulation.problem
    answer = _solved(problem, (*program.starts, found.choice), possible(problem, seen.near), how.part(FIRST))
    found = replace(found, bound=max(found.bound, answer.bound))
    if answer.choice is None or answer.cost >= min(seen.cost, found.cost) * (1.0 - LITTLE):
        return settled(found, found.choice, found.cost)
    fits = _filled(program, _corrected(program, answer, how.part(FIRST)), how)
    return settled(found, *min(((c.choice, c.cost) for c in (found, fits) if c.choice is not None), key=lambda plan: plan[1]))


def _floored(program: Program, floors: Floors, first: Solution, how: How) -> tuple[Program, Solution]:
    """The program with floor rows at moments of backward at which the plan found certainly needs too much, until there is no such
    moment, and what a search finds under them. Its bound holds for every plan."""
    found, problem = first, program.formulation.problem
    if problem.is_large and how.clock.left < SHORT * first.seconds:
        return program, first  # it would be cut short
    for n in range(FLOORED):
        full = _overfull(floors, program.timelines(found.choice), found.choice)
        if not full or how.clock.expired():
            break
        needed = [(moment, found.choice) for moment in full]
        program, share = _with_floors(program, floors, needed), FIRST if n else _as_long(problem, first, ROUND, 1.0, how)
        program.learned.floored += needed
        problem = program.formulation.problem
        answer = _solved(problem, program.starts, possible(problem, found.near), how.part(share))
        bound = max(found.bound, answer.bound)
        if answer.status is Status.INFEASIBLE:
            return program, answer
        if answer.choice is None or answer.status is Status.TIME_LIMIT and answer.gap > max(ROUGHLY if problem.is_large else FAR, 2 * found.gap):
            # cut short: what was found before is nearer, and near enough for rounds
            return program, replace(found, bound=min(bound, found.cost))
        found = settled(replace(answer, bound=bound, near=_met(answer.near, found.near)), answer.choice, answer.cost)
    return program, found


def _with_floors(program: Program, floors: Floors, needed: Sequence[tuple[str, np.ndarray]]) -> Program:
    """The program with a floor row for each moment, exact near its choice."""
    grown = program.formulation
    for moment, choice in needed if floors.possible else ():
        grown = with_floor(grown, floors, moment, choice)
    return replace(program, formulation=grown)


def _as_long(problem: Problem, first: Solution, least: float, most: float, how: How) -> float:
    """The share of the time for a search, or for several, of which the first takes about as long as `first` did; of a small problem the `least`."""
    if not problem.is_large:
        return least
    return max(least, min(most, TIMES * first.seconds / max(how.clock.left, first.seconds)))


def _overfull(floors: Floors, timeline: Timeline, choice: np.ndarray) -> list[str]:
    """Of every stretch of the step that takes more than the budget, the moment near its fullest one whose floor row the choice loads most, where
    that is too much."""
    total, aim, out = timeline.live.sum(axis=1), floors.formulation.budget.peak, []
    for stretch in np.array_split(np.arange(len(total)), min(MOMENTS, len(total))):
        t = int(stretch[np.argmax(total[stretch])])
        loads = {m: floors.load(m, choice) for m in floors.near(timeline.moment_of(t), NEAR)} if total[t] > aim else {}
        most = max(loads, key=lambda moment: loads[moment], default=None)
        if most is not None and loads[most] > aim:
            out.append(most)
    return out


def search_ample(program: Program, how: How) -> Solution:
    """The cheapest plan with ample memory. Where layers repeat and the cheapest tied plan certainly does not fit, that one is
    returned; while the cheapest plan known leaves room, no time is kept for other searches. The bound holds for any memory limit, and for
    programs with recomputation."""
    formulation, learned = program.formulation, program.learned
    found = how.solve_until_tied(ample(formulation.problem), program.starts, lambda choice: not fits_rows(formulation, choice), learned.near,
                                 lambda choice: leaves_room(formulation, choice), learned.seen)
    learned.keep(found)
    return found


def _corrected(program: Program, first: Solution, how: How) -> Solution:
    """`first` if its timeline fits; else the best of further rounds and of the starting plans. Limits are lowered at first; where that leads to
    nothing, or to a plan far from the bound, moments get rows. The bound stays that of `first`: later limits are corrected by one plan and prove
    nothing."""
    aim, timelines = program.formulation.budget.peak, program.timelines
    last, met, near, lowered, by_rows = first, list(program.starts), first.near, program.formulation, program.formulation
    over, part, with_rows = timelines(first.choice).peak - aim, 1.0, 0
    for n in range(ROUNDS):
        if over <= 0 and last is not first and not with_rows and last.cost > (1.0 + FAR) * first.bound:
            last, over, with_rows = first, timelines(first.choice).peak - aim, 1
        if over <= 0 or how.clock.expired():
            break
        with_rows += bool(with_rows) or n >= LOWERED
        if not with_rows:
            grown = _lowered(lowered, timelines(last.choice), last.choice, aim, part)
        else:
            grown = by_rows = _grown(by_rows, timelines(last.choice), last.choice, aim * (1.0 - STEP * (with_rows - 1)))
        share = min(1.0, 2 / (ROUNDS - n))  # a search that is cut short is worth little: most end long before, and few rounds are needed
        rough = replace(how.part(share), enough=max(how.enough, ROUGH * over / aim))
        found = _again(grown.problem, program, first, last.choice, near, rough)
        near = _met(found.near, near)
        met += [choice for choice in near if np.isfinite(evaluate(grown.problem, choice))]  # cheaper ones that were found may not fit
        if found.choice is not None:
            last, over = found, timelines(found.choice).peak - aim
            met.append(found.choice)
            lowered = lowered if with_rows else grown
        elif with_rows:
            break
        else:
            part /= 2
    if last is first and over <= 0:
        return first
    best = program.cheapest_fitting(met)  # a row corrected by one plan may forbid another one that fits
    return settled(first, *best) if best else replace(first, choice=None, cost=np.inf, status=Status.UNKNOWN)


def _filled(program: Program, found: Solution, how: How) -> Solution:
    """`found` made cheaper with the memory that it leaves free. Rows of its fullest moments, each corrected by what it miscounts of the plan, are
    right about plans near it. A cheaper one under them, of its neighbourhoods or where these have none of a search, is played and corrects them,
    whether it fits or not."""
    if found.choice is None:
        return found
    aim, timelines, near, best = program.formulation.budget.peak, program.timelines, found.near, found
    rows = _grown(program.formulation, timelines(best.choice), best.choice, aim, FULL * aim)
    around = (aim, best.choice.tobytes()) not in program.learned.best_around
    for n in range(FILLED):
        if best.gap <= CLOSED or how.clock.expired():
            break
        starts = (best.choice, without_idle(program.formulation, best.choice))
        if around:
            part = how.part(AROUND)
            answer = _around(rows.problem, best, starts, part)
        else:
            answer = _solved(rows.problem, starts, near, how.part(1 / (FILLED - n)))
            near = _met(answer.near, near)
            best = _cheapest_met(program, rows.problem, best, near)
        if answer.choice is None or answer.cost >= best.cost * (1.0 - LITTLE):
            if not around:
                break
            around = False
            if not part.clock.expired():
                program.learned.best_around.add((aim, best.choice.tobytes()))
            continue
        timeline, around = timelines(answer.choice), True
        if timeline.peak <= aim:
            best = settled(best, answer.choice, answer.cost)
            rows = _grown(program.formulation, timeline, best.choice, aim, FULL * aim)
        else:
            rows = _grown(rows, timeline, answer.choice, aim)
    return best


def _cheapest_met(program: Program, problem: Problem, best: Solution, near: Sequence[np.ndarray]) -> Solution:
    """The cheapest of the choices met that are within the rows of `problem`, where it fits and is cheaper than `best`."""
    fits = program.cheapest_fitting(c for c in near if evaluate(problem, c) < best.cost * (1.0 - LITTLE))
    return best if fits is None else settled(best, *fits)


def _around(problem: Problem, best: Solution, starts: Sequence[np.ndarray], how: How) -> Solution:
    """What neighbourhoods make of the last of `starts` that is feasible; without a choice where none is."""
    known = neighbourhoods_of(problem)
    better = next(filter(None, (how.improve(problem, start, False, known) for start in reversed(starts))), None)
    return replace(best, choice=None) if better is None else settled(best, *better)


def _lowered(formulation: Formulation, timeline: Timeline, choice: np.ndarray, aim: float, part: float) -> Formulation:
    """Lower limits of the rows there are, by a part of what the plan's timeline is over where they count: of every stretch of the step that of its
    floor rows, which miscount little, and of stretches without one that of the turn, since most moments are fuller than the turn by as much in all
    plans near this one."""
    total, loads = timeline.live.sum(axis=1), row_loads(formulation.problem, without_idle(formulation, choice))
    last, over = max(1, len(total) - 1), {"update": float(total[-1]) - aim}  # in inference there is no row of the update
    runs = {row: timeline.begins(op) for row, op in floored_ops(formulation).items()}
    for stretch in np.array_split(np.arange(last), min(MOMENTS, last)):
        most = float(total[stretch].max()) - aim
        for row in [row for row, t in runs.items() if t in stretch] or ["turn"]:
            over[row] = max(over.get(row, 0.0), most)
    for row, more in over.items():
        if more > 0 and row in formulation.memory_rows:
            formulation = limited(formulation, row, loads[formulation.memory_rows[row]] - part * more)
    return formulation


def _grown(formulation: Formulation, timeline: Timeline, choice: np.ndarray, aim: float, full: float | None = None) -> Formulation:
    """A row, or a lower limit of the row there is, for the fullest moment of every stretch of the step that takes more than `aim`, or than `full`;
    the row's limit makes up for what the row miscounts of this plan."""
    full = aim if full is None else full
    total = timeline.live.sum(axis=1)
    fullest = [int(stretch[np.argmax(total[stretch])]) for stretch in np.array_split(np.arange(len(total)), min(MOMENTS, len(total)))]
    moments = {t: timeline.moment_of(t) for t in fullest if total[t] > full}
    formulation = with_rows(formulation, moments.values())
    loads = row_loads(formulation.problem, without_idle(formulation, choice))
    for t, moment in moments.items():
        formulation = limited(formulation, moment, aim - (total[t] - loads[formulation.memory_rows[moment]]))
    return formulation


def fit_memory(formulation: Formulation, first: Solution, how: How) -> Solution:
    """Where the search found nothing that fits: price the memory rows, and close in on the price at which plans fit.

    At price m per byte the problem has no memory rows, and its bound minus m x the limits is a bound of the whole. The next
    price makes the cheapest plan known that fits and the best that does not equally dear (secant). Returns `first`
    when nothing fits."""
    problem, rows = formulation.problem, rows_of(formulation)
    least = how.part(1 / (ROUNDS + 2)).solve(least_memory(problem, rows))
    if least.choice is None or not fits_rows(formulation, least.choice):
        return first
    best = _Point.of(problem, rows, least.choice)
    price, over, bound = 0.0, None, first.bound
    for n in range(ROUNDS + 1):
        if how.clock.expired():
            break
        answer = how.part(1 / (ROUNDS + 1 - n)).solve(memory_priced(problem, rows, price), (best.choice,))
        bound = max(bound, answer.bound - price * float(problem.row_limit[rows].sum()))
        point = _Point.of(problem, rows, answer.choice)
        if point.excess <= 0 and point.seconds < best.seconds:
            best = point
        elif point.excess > 0:
            over = point
        else:
            break
        if how.progress:
            how.progress(Event(best.seconds, bound, (best.seconds - bound) / max(abs(best.seconds), 1e-300), answer.seconds, "memory priced"))
        if over is None:
            break
        price = max(0.0, (best.seconds - over.seconds) / (over.excess - best.excess))
    return settled(replace(first, bound=bound), best.choice, best.seconds)


@dataclass(frozen=True, eq=False)
class _Point:
    """A choice with the bytes it is over on its worst memory row (negative: room), and its cost when memory is ample."""

    choice: np.ndarray
    excess: float
    seconds: float

    @staticmethod
    def of(problem: Problem, rows: np.ndarray, choice: np.ndarray) -> _Point:
        excess = row_loads(problem, choice)[rows] - problem.row_limit[rows]
        return _Point(choice, float(excess.max()), evaluate(ample(problem), choice))
