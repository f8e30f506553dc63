"""Search for a plan that fits in memory: a list of attempts, tried in order.

Training: with ample memory, whose plan is the answer where it fits. Then with the budget: recomputation chosen by the search, and where gradients
that wait fill much of the memory, the same with fewer of them; if that finds nothing, though some plan fits, nothing recomputed, then all of it:
fewer options are easier to search. Inference: with
the budget. What no search finds, a starting plan may be, or the plan of least memory.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from autoshard.decide.how import How
from autoshard.decide.memory.fit import CLOSED, search_ample, search_on, search_within
from autoshard.decide.memory.memory_problems import leaves_room, stored_is_too_much
from autoshard.decide.memory.offload import move_to_fit, search_offloading
from autoshard.decide.program import NOTHING, Program, settled
from autoshard.decide.variants import Variants
from autoshard.search.problem import Solution, Status

AMPLE = 0.5  # share of the time left for the search with ample memory, where memory may matter
UNSURE = 0.5  # share of the time left for a search that may find nothing; the rest is for explaining why nothing fits
SHORT, LIGHT = 0.6, 0.6  # of that share, where fewer gradients may wait, for the search in which as many do as where memory is ample, which may find
# the best plan soon; of the share after it, for the search in which fewer do: with them a plan hardly takes more than what rows count
MOST = 0.65  # of what is left, for the first of these two where it has shown that it finds something near its bound
UNREFINED = 0.5  # share of the time left for searches whose plans are not refined op by op, where others are
PLAIN = 0.5  # share of the time left for the search without recomputation, after the one that chooses it
FULL, FEW = "as many gradients wait as with ample memory", "fewer wait"
EVERY = (FULL, FEW)
"""The plans that there are, by how many gradients may wait; fewer only where memory is little."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What the attempts so far found: `solution` of `program`'s problem, the cheapest plan that fits, or without a choice. `bounds`: of the plans
    of each kind that there are, inf where none exists. `starts`: more plans of the plain program to start from. `final`: no other attempt can do
    better. `ample`: a bound of every plan whatever the memory; 0 where that was not looked for."""

    program: Program
    solution: Solution = NOTHING
    bounds: Mapping[str, float] = field(default_factory=lambda: {FULL: -np.inf})
    starts: tuple[np.ndarray, ...] = ()
    final: bool = False
    ample: float = 0.0

    @property
    def bound(self) -> float:
        """Of every plan."""
        return min(self.bounds.values())

    @property
    def found(self) -> bool:
        return self.solution.choice is not None


@dataclass(frozen=True)
class Attempt:
    """A search of one variant of the program (`of`), in a `share` of the time left, where it is `due`. `covers`: kinds of plans of which the
    variant has every one, so that its bound holds for all of them, and none exists where it is infeasible. `enough`: its plan is the answer
    where it fits. `ample`: its bound holds for any memory."""

    of: Callable[[Variants], Program]
    search: Callable[[Program, How], Solution]
    share: Callable[[Variants], float] = lambda variants: 1.0
    due: Callable[[Variants, Outcome], bool] = lambda variants, so_far: True
    covers: tuple[str, ...] = ()
    enough: bool = False
    ample: bool = False


def search(variants: Variants) -> Outcome:
    """Try what there is to try. Where stored tensors alone are too much, nothing is."""
    if stored_is_too_much(variants.plain.formulation):
        return Outcome(variants.plain, replace(NOTHING, status=Status.INFEASIBLE), final=True)
    return try_in_order(variants, TRAINING if variants.training else INFERENCE)


def try_in_order(variants: Variants, attempts: Iterable[Attempt]) -> Outcome:
    """Try the attempts until one is final. Its solution has the status that its search gave; another one is proven by the bound of
    all attempts, or not."""
    so_far = Outcome(variants.plain, bounds=dict.fromkeys(EVERY if variants.little else (FULL,), -np.inf))
    for attempt in attempts:
        if attempt.due(variants, so_far):
            so_far = _tried(attempt, variants, so_far)
        if so_far.final:
            break
    return replace(so_far, solution=_with_status(so_far, variants.how.clock.stopped))


def _tried(attempt: Attempt, variants: Variants, so_far: Outcome) -> Outcome:
    """What is known after one more attempt."""
    program = attempt.of(variants)
    if program is variants.plain:
        program = replace(program, starts=(*program.starts, *so_far.starts))
    how = variants.first if attempt.enough and variants.first else variants.how
    solution = attempt.search(program, replace(how.part(attempt.share(variants)), proves=bool(attempt.covers)))
    fits = solution.choice is not None and program.fits(solution.choice)
    if attempt.ample and np.isfinite(solution.bound):
        so_far = replace(so_far, ample=max(0.0, solution.bound))
    if attempt.covers:
        proven = np.inf if solution.status is Status.INFEASIBLE else solution.bound
        bounds = {kind: max(bound, proven) if kind in attempt.covers else bound for kind, bound in so_far.bounds.items()}
        so_far = replace(so_far, bounds=bounds, final=fits and attempt.enough or min(bounds.values()) == np.inf)
    if solution.choice is not None and not fits:
        return replace(so_far, starts=(*so_far.starts, *_moved(program, solution.choice)))
    if fits and solution.cost < so_far.solution.cost or attempt.covers and not so_far.found:
        return replace(so_far, program=program, solution=solution)
    return so_far


def _moved(program: Program, choice: np.ndarray) -> tuple[np.ndarray, ...]:
    """A choice that does not fit, with optimizer state moved to the host until it does, where that is allowed and enough."""
    moved = move_to_fit(program, choice) if program.formulation.table.training.offload else None
    return () if moved is None else (moved,)


def _with_status(so_far: Outcome, stopped: bool) -> Solution:
    found = so_far.solution
    if not so_far.final:
        found = replace(found, bound=so_far.bound)
        found = settled(found, found.choice, found.cost) if found.choice is not None else found
    interrupted = stopped and so_far.found and found.status is not Status.OPTIMAL
    return replace(found, status=Status.INTERRUPTED) if interrupted else found


# --- searches ---

def _search_tight(program: Program, how: How, brief: bool = False) -> Solution:
    offload = program.formulation.table.training.offload
    return search_offloading(program, how) if offload else search_within(program, how, brief)


def _cheapest_start(program: Program, how: How) -> Solution:
    best = program.cheapest_fitting(program.starts)
    return settled(NOTHING, *best) if best else NOTHING


# --- shares of the time left ---

def _ample_share(variants: Variants) -> float:
    """All of it where every starting plan, fully replicated ones included, leaves room on every memory row: memory hardly matters."""
    plain = variants.plain
    return 1.0 if all(leaves_room(plain.formulation, choice) for choice in plain.starts) else AMPLE


def _sure_share(variants: Variants) -> float:
    """All of it where a starting plan fits; else some is kept to find one, or to explain why none exists."""
    return 1.0 if variants.plain.cheapest_fitting(variants.plain.starts) else UNSURE


def _open_share(variants: Variants) -> float:
    """All of it where the ample plan fits once it is recomputed. Where no starting plan fits, none would be refined."""
    fits = variants.open.cheapest_fitting(variants.open.learned.choices)
    return (SHORT if variants.little else 1.0) * (1.0 if fits else min(_sure_share(variants), _unrefined_share(variants)))


def _light_share(variants: Variants) -> float:
    return LIGHT * _unrefined_share(variants)


def _unrefined_share(variants: Variants) -> float:
    """Not all where plans without recomputation are refined: if nothing is found, the cheapest start is one of these."""
    return UNREFINED if variants.first else 1.0


# --- when they are due ---

def _time_is_left(variants: Variants, so_far: Outcome) -> bool:
    return not variants.how.clock.expired()


def _only_full(variants: Variants, so_far: Outcome) -> bool:
    return variants.little is None and _time_is_left(variants, so_far)


def _full_first(variants: Variants, so_far: Outcome) -> bool:
    """Where fewer gradients may wait, too: there is more to try, and this program comes again."""
    return variants.little is not None and _time_is_left(variants, so_far)


def _full_again(variants: Variants, so_far: Outcome) -> bool:
    """The search for a bound found that some choice is near it; what is lacking is time."""
    return variants.little is not None and not so_far.found and np.isfinite(so_far.bounds[FULL]) and _time_is_left(variants, so_far)


def _may_be_cheaper(variants: Variants, so_far: Outcome) -> bool:
    """Time was kept for the case that nothing is found, and something was."""
    return so_far.found and so_far.solution.cost - so_far.bound > CLOSED * so_far.solution.cost and _time_is_left(variants, so_far)


def _less_may_wait(variants: Variants, so_far: Outcome) -> bool:
    """Fewer gradients, and nothing was found that is near its bound."""
    return variants.little is not None and _time_is_left(variants, so_far) and (not so_far.found or _may_be_cheaper(variants, so_far))


def _as_light(variants: Variants, so_far: Outcome) -> bool:
    return _may_be_cheaper(variants, so_far) and variants.little is not None and so_far.program is variants.light


def _as_open(variants: Variants, so_far: Outcome) -> bool:
    return _may_be_cheaper(variants, so_far) and not _as_light(variants, so_far)


def _missed(variants: Variants, so_far: Outcome) -> bool:
    """Nothing was found, though a plan fits."""
    return not so_far.found and _time_is_left(variants, so_far) and variants.leanest_fits


def _no_start_fits(variants: Variants, so_far: Outcome) -> bool:
    """After Ctrl-C the plan of least memory is not searched for, nor where a plan was found: it may take half of the time left."""
    return not so_far.found and not variants.how.clock.stopped and not variants.plain.cheapest_fitting((*variants.plain.starts, *so_far.starts))


START = Attempt(lambda v: v.plain, _cheapest_start)
LEANEST = Attempt(lambda v: v.with_leanest, _cheapest_start, due=_no_start_fits)
TRAINING = (
    Attempt(lambda v: v.plain, search_ample, _ample_share, covers=EVERY, enough=True, ample=True),
    Attempt(lambda v: v.open, _search_tight, _open_share, due=_only_full, covers=(FULL,)),
    Attempt(lambda v: v.open, partial(_search_tight, brief=True), _open_share, due=_full_first, covers=(FULL,)),
    Attempt(lambda v: v.open, _search_tight, lambda v: MOST * _unrefined_share(v), due=_full_again, covers=(FULL,)),
    Attempt(lambda v: v.light, _search_tight, _light_share, due=_less_may_wait, covers=(FEW,)),
    Attempt(lambda v: v.open, _search_tight, _unrefined_share, due=_less_may_wait, covers=(FULL,)),
    Attempt(lambda v: v.light, search_on, due=_as_light),
    Attempt(lambda v: v.open, search_on, due=_as_open),
    Attempt(lambda v: v.plain, _search_tight, lambda v: PLAIN * _unrefined_share(v), due=_missed),
    Attempt(lambda v: v.lean, _search_tight, _unrefined_share, due=_missed),
    START,
    LEANEST,
)
INFERENCE = (Attempt(lambda v: v.plain, search_within, _sure_share, covers=EVERY, enough=True), START, LEANEST)
